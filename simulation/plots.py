"""Plots of a simulation as PNG files, by matplotlib, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.report import sent, spread
from simulation.session import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = ("#3b6fb6", "#d1662f", "#3d8b56")


def draw(outcome: Simulated, directory: Path) -> list[str]:
    """Draws all plots that have data. Returns their file names; none if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    wanted: dict[str, Callable[[Simulated, Axes], None]] = {"accuracy": _accuracy, "devices": _devices}
    if sent(outcome):
        wanted["bytes"] = _bytes
    if outcome.rounds[-1].epsilon:
        wanted["epsilon"] = _epsilon
    for name, plot in wanted.items():
        figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
        plot(outcome, figure.add_subplot())
        # Metadata without matplotlib's version, so that equal reports give equal files.
        figure.savefig(directory / f"{name}.png", metadata={"Software": None})
    return [f"{name}.png" for name in wanted]


def _accuracy(outcome: Simulated, axes: Axes) -> None:
    numbers = [record.number for record in outcome.rounds]
    low, middle, high = zip(*(spread(record) for record in outcome.rounds), strict=True)
    axes.fill_between(numbers, low, high, color=INK[0], alpha=0.2, label="devices, 10th to 90th percentile")
    axes.plot(numbers, middle, color=INK[0], linestyle="--", label="device, median")
    axes.plot(numbers, [record.accuracy for record in outcome.rounds], color=INK[1], marker="o", label="test examples")
    axes.set(xlabel="round", ylabel="accuracy of the shared adapter", ylim=(0, 1.02), xticks=_ticks(numbers))
    axes.legend(loc="upper left")


def _devices(outcome: Simulated, axes: Axes) -> None:
    for record, colour, label in ((outcome.rounds[0], INK[0], "before"), (outcome.rounds[-1], INK[1], "after")):
        values = sorted(record.devices.values())
        axes.plot([at / max(len(values) - 1, 1) for at in range(len(values))], values, color=colour, label=label)
    axes.set(xlabel="share of the devices", ylabel="accuracy on their own data", ylim=(0, 1.02))
    axes.legend(loc="lower right")


def _bytes(outcome: Simulated, axes: Axes) -> None:
    shown = sent(outcome)
    bars = axes.barh(list(shown), list(shown.values()), color=INK[: len(shown)])
    axes.bar_label(bars, [f"{value:,.0f}" for value in shown.values()], padding=4)
    axes.set(xlabel="bytes sent per device and round")
    axes.margins(x=0.15)
    axes.invert_yaxis()


def _epsilon(outcome: Simulated, axes: Axes) -> None:
    for name, colour in zip(outcome.rounds[-1].epsilon, INK, strict=False):
        values = [record.epsilon.get(name, 0.0) for record in outcome.rounds]
        axes.plot([record.number for record in outcome.rounds], values, color=colour, marker="o", label=f"of {name}")
    axes.set(xlabel="round", ylabel="epsilon spent", ylim=(0, None), xticks=_ticks(range(len(outcome.rounds))))
    axes.legend(loc="lower right")


def _ticks(numbers: range | list[int]) -> list[int]:
    return list(numbers)[:: max(1, len(numbers) // 10)]
