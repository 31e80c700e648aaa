"""Timing by turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def by_turns(rounds: int, calls: Mapping[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Returns the seconds of each call, `rounds` times in turn after one warm-up, so that all see the same load."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call(number)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Returns how many times faster the second call is: the median over turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
