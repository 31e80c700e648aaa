"""Release numbers, and what is asked of them: `>=1.5,<2`. Knows neither packages nor ExecuTorch."""

from __future__ import annotations

import re

_CONDITION = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+){0,3})\s*")
_RELEASE = re.compile(r"\d+(?:\.\d+){0,3}")
_PARTS = 4


def release(version: str) -> tuple[int, ...]:
    """The four numbers that a version begins with, absent ones as 0: `1.5.1+cpu` is (1, 5, 1, 0).

    Raises ValueError if it begins with none.
    """
    found = _RELEASE.match(version)
    if found is None:
        raise ValueError(f"{version!r} does not begin with a release number such as 1.5.1")
    numbers = [int(number) for number in found[0].split(".")]
    return tuple(numbers + [0] * (_PARTS - len(numbers)))


def conditions(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """What `text` asks, all of which must hold. Raises ValueError if it is not understood."""
    found = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is no condition on a version; write for example >=1.5,<2")
        found.append((match[1], release(match[2])))
    return found


def satisfies(version: str, text: str) -> bool:
    """Whether a version meets every condition of `text`. Raises ValueError if either is not understood."""
    has = release(version)
    return all(
        {
            ">=": has >= wanted,
            "<=": has <= wanted,
            "==": has == wanted,
            "!=": has != wanted,
            "<": has < wanted,
            ">": has > wanted,
        }[sign]
        for sign, wanted in conditions(text)
    )
