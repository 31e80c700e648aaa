"""Release numbers and conditions on them, such as `>=1.5,<2`."""

from __future__ import annotations

import re

_CONDITION = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+){0,3})\s*")
_RELEASE = re.compile(r"\d+(?:\.\d+){0,3}")
_PARTS = 4


def release(version: str) -> tuple[int, ...]:
    """Returns the four leading numbers of a version, missing ones as 0: `1.5.1+cpu` is (1, 5, 1, 0).

    Raises ValueError if the version does not start with a release number.
    """
    found = _RELEASE.match(version)
    if found is None:
        raise ValueError(f"{version!r} does not start with a release number such as 1.5.1")
    numbers = [int(number) for number in found[0].split(".")]
    return tuple(numbers + [0] * (_PARTS - len(numbers)))


def conditions(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parses conditions, all of which must hold. Raises ValueError for an invalid one."""
    found = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a version condition; an example is >=1.5,<2")
        found.append((match[1], release(match[2])))
    return found


def satisfies(version: str, text: str) -> bool:
    """Whether a version meets every condition in `text`. Raises ValueError if either is invalid."""
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
