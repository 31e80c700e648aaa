"""A simulation's plots as PNG files, by matplotlib, which is an extra. Knows what came out, not how it came about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.report import sent, spread
from simulation.session import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = ("#3b6fb6", "#d1662f", "#3d8b56")


def draw(found: Simulated, directory: Path) -> list[str]:
    """Draws all that there is something to show of; the files' names. None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    wanted: dict[str, Callable[[Simulated, Axes], None]] = {"accuracy": _accuracy, "devices": _devices}
    if sent(found):
        wanted["bytes"] = _bytes
    if found.rounds[-1].epsilon:
        wanted["epsilon"] = _epsilon
    for name, plot in wanted.items():
        figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
        plot(found, figure.add_subplot())
        # Without the version of matplotlib in it: equal reports are equal files.
        figure.savefig(directory / f"{name}.png", metadata={"Software": None})
    return [f"{name}.png" for name in wanted]


def _accuracy(found: Simulated, axes: Axes) -> None:
    numbers = [told.number for told in found.rounds]
    low, middle, high = zip(*(spread(told) for told in found.rounds), strict=True)
    axes.fill_between(numbers, low, high, color=INK[0], alpha=0.2, label="devices, 10th to 90th percentile")
    axes.plot(numbers, middle, color=INK[0], linestyle="--", label="device, median")
    axes.plot(numbers, [told.accuracy for told in found.rounds], color=INK[1], marker="o", label="test examples")
    axes.set(xlabel="round", ylabel="accuracy of the shared adapter", ylim=(0, 1.02), xticks=_ticks(numbers))
    axes.legend(loc="upper left")


def _devices(found: Simulated, axes: Axes) -> None:
    for told, colour, label in ((found.rounds[0], INK[0], "before"), (found.rounds[-1], INK[1], "after")):
        values = sorted(told.devices.values())
        axes.plot([at / max(len(values) - 1, 1) for at in range(len(values))], values, color=colour, label=label)
    axes.set(xlabel="share of the devices", ylabel="accuracy on their own data", ylim=(0, 1.02))
    axes.legend(loc="lower right")


def _bytes(found: Simulated, axes: Axes) -> None:
    shown = sent(found)
    bars = axes.barh(list(shown), list(shown.values()), color=INK[: len(shown)])
    axes.bar_label(bars, [f"{value:,.0f}" for value in shown.values()], padding=4)
    axes.set(xlabel="bytes that a device sends in a round")
    axes.margins(x=0.15)
    axes.invert_yaxis()


def _epsilon(found: Simulated, axes: Axes) -> None:
    for name, colour in zip(found.rounds[-1].epsilon, INK, strict=False):
        values = [told.epsilon.get(name, 0.0) for told in found.rounds]
        axes.plot([told.number for told in found.rounds], values, color=colour, marker="o", label=f"of {name}")
    axes.set(xlabel="round", ylabel="epsilon spent", ylim=(0, None), xticks=_ticks(range(len(found.rounds))))
    axes.legend(loc="lower right")


def _ticks(numbers: range | list[int]) -> list[int]:
    return list(numbers)[:: max(1, len(numbers) // 10)]
