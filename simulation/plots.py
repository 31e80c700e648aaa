"""Plots of a simulation as PNG files, by matplotlib, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.report import accuracy_percentiles, bytes_sent
from simulation.session import SimulationOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#3b6fb6", "#d1662f", "#3d8b56")


def draw(outcome: SimulationOutcome, directory: Path) -> list[str]:
    """Draws all plots that have data. Returns their file names; none if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    plots: dict[str, Callable[[SimulationOutcome, Axes], None]] = {"accuracy": _accuracy, "devices": _devices}
    if bytes_sent(outcome):
        plots["bytes"] = _bytes
    if outcome.rounds[-1].epsilon:
        plots["epsilon"] = _epsilon
    for name, plot in plots.items():
        figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
        plot(outcome, figure.add_subplot())
        # Metadata without matplotlib's version, so that equal reports give equal files.
        figure.savefig(directory / f"{name}.png", metadata={"Software": None})
    return [f"{name}.png" for name in plots]


def _accuracy(outcome: SimulationOutcome, axes: Axes) -> None:
    numbers = [record.number for record in outcome.rounds]
    low, middle, high = zip(*(accuracy_percentiles(record) for record in outcome.rounds), strict=True)
    axes.fill_between(numbers, low, high, color=COLOURS[0], alpha=0.2, label="devices, 10th to 90th percentile")
    axes.plot(numbers, middle, color=COLOURS[0], linestyle="--", label="device, median")
    axes.plot(
        numbers, [record.accuracy for record in outcome.rounds], color=COLOURS[1], marker="o", label="test examples"
    )
    axes.set(xlabel="round", ylabel="accuracy of the shared adapter", ylim=(0, 1.02), xticks=_ticks(numbers))
    axes.legend(loc="upper left")


def _devices(outcome: SimulationOutcome, axes: Axes) -> None:
    for record, colour, label in ((outcome.rounds[0], COLOURS[0], "before"), (outcome.rounds[-1], COLOURS[1], "after")):
        values = sorted(record.devices.values())
        axes.plot([index / max(len(values) - 1, 1) for index in range(len(values))], values, color=colour, label=label)
    axes.set(xlabel="share of the devices", ylabel="accuracy on their own data", ylim=(0, 1.02))
    axes.legend(loc="lower right")


def _bytes(outcome: SimulationOutcome, axes: Axes) -> None:
    sizes = bytes_sent(outcome)
    bars = axes.barh(list(sizes), list(sizes.values()), color=COLOURS[: len(sizes)])
    axes.bar_label(bars, [f"{value:,.0f}" for value in sizes.values()], padding=4)
    axes.set(xlabel="bytes sent per device and round")
    axes.margins(x=0.15)
    axes.invert_yaxis()


def _epsilon(outcome: SimulationOutcome, axes: Axes) -> None:
    for name, colour in zip(outcome.rounds[-1].epsilon, COLOURS, strict=False):
        values = [record.epsilon.get(name, 0.0) for record in outcome.rounds]
        axes.plot([record.number for record in outcome.rounds], values, color=colour, marker="o", label=f"of {name}")
    axes.set(xlabel="round", ylabel="epsilon spent", ylim=(0, None), xticks=_ticks(range(len(outcome.rounds))))
    axes.legend(loc="lower right")


def _ticks(numbers: range | list[int]) -> list[int]:
    return list(numbers)[:: max(1, len(numbers) // 10)]
