"""A log-log plot of what bases of growing size take, with the exponents of the fitted power laws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.result import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SIZES = 3  # of a slope
ESTIMATORS = {"replay": "#3b6fb6", "gradient": "#d1662f", "directional": "#3d8b56"}
TIMES = {"compile_seconds": "#777777", "load_seconds": "#b8860b"}
MEMORY = {"compile_peak_bytes": "#777777", "peak_rss_bytes": "#3b6fb6", "ptd_bytes": "#bbbbbb"}


def int8_rows(estimator: str, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of one estimator in int8, which every size has."""
    return [row for row in rows if (row["precision"], row["estimator"]) == ("int8", estimator)]


def slope(rows: Sequence[Row], across: str, name: str) -> float | None:
    """Returns d log(name) / d log(across) by least squares; None for fewer than LEAST_SIZES rows."""
    measured = [row for row in rows if name in row]
    if len(measured) < LEAST_SIZES:
        return None
    points = np.log([[row[across], row[name]] for row in measured])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draws seconds and bytes over the number of weights, int8; the format follows the suffix of `path`."""
    from matplotlib.figure import Figure  # half a second, which no other command should wait for

    figure = Figure(figsize=(9, 4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for estimator, colour in ESTIMATORS.items():
        _draw(seconds, int8_rows(estimator, rows), "step_seconds", colour, f"a step, {estimator}")
    for name, colour in TIMES.items():
        _draw(seconds, int8_rows("replay", rows), name, colour, name.removesuffix("_seconds"))
    for name, colour in MEMORY.items():
        _draw(memory, int8_rows("replay", rows), name, colour, name.removesuffix("_bytes").replace("_", " "))
    seconds.set(ylabel="seconds")
    memory.set(ylabel="bytes")
    for axes in (seconds, memory):
        axes.set(xlabel="weights of the base", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axes: Axes, rows: Sequence[Row], name: str, colour: str, label: str) -> None:
    measured = sorted((row for row in rows if name in row), key=lambda row: row["parameters"])
    if not measured:
        return
    exponent = slope(measured, "parameters", name)
    if exponent is not None:
        label += f" (slope {exponent:.2f})"
    axes.plot([row["parameters"] for row in measured], [row[name] for row in measured], "o-", color=colour, label=label)
