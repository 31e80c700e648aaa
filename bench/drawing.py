"""A result's plot as a picture, and in words for who cannot see it."""

from __future__ import annotations

import io

from bench.result import Plot, cell_text

INCHES, DPI = (7.2, 3.8), 130
FEW = 6  # points that alternative text names one by one
TICKS = 9  # places at most that are named on a logarithmic axis


def png(plot: Plot) -> bytes:
    """Drawn by matplotlib, on white so that it reads in the dark too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter

    figure, axes = pyplot.subplots(figsize=INCHES, layout="constrained")
    if plot.kind == "bars":
        width = 0.8 / max(len(plot.series), 1)
        for number, (name, points) in enumerate(plot.series.items()):
            places = [x + (number - (len(plot.series) - 1) / 2) * width for x, _ in points]
            axes.bar(places, [y for _, y in points], width, label=name)
        axes.set_xticks(range(len(plot.groups)), plot.groups, rotation=20 if len(plot.groups) > 5 else 0)
    else:
        for name, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
    if plot.log_x:
        places = sorted({x for points in plot.series.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        if len(places) <= TICKS:
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.set_xticks([], minor=True)
    if plot.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    axes.grid(visible=True, axis="y", alpha=0.3)
    if plot.series:
        figure.legend(loc="outside lower center", ncols=min(len(plot.series), 3), fontsize="small", frameon=False)
    drawn = io.BytesIO()
    # Without the library's version in it, the same plot is the same bytes.
    figure.savefig(drawn, dpi=DPI, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)
    return drawn.getvalue()


def in_words(plot: Plot) -> str:
    """Alternative text: what is drawn over what, and each series' figures, or its ends if they are many."""
    return f"{plot.title}. {plot.y} over {plot.x}. " + " ".join(
        f"{name}: {_points(plot, points)}." for name, points in plot.series.items()
    )


def _points(plot: Plot, points: tuple[tuple[float, float], ...]) -> str:
    named = points if len(points) <= FEW else (points[0], points[-1])
    words = ", ".join(f"{cell_text(y)} at {_place(plot, x)}" for x, y in named)
    if len(points) > FEW:
        values = [y for _, y in points]
        words += f", between {cell_text(min(values))} and {cell_text(max(values))}"
    return words


def _place(plot: Plot, x: float) -> str:
    groups = plot.kind == "bars" and 0 <= x < len(plot.groups)
    return plot.groups[int(x)] if groups else cell_text(x)
