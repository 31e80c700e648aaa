"""A job's training curve for notebooks: losses and accuracies by step, as a data frame or a plot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from shared.job import JobView, Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

INSTALL_HINT = "install it with `pip install 'mobizo[notebook]'`"


@dataclass(frozen=True)
class CurvePoint:
    """Measurements after `step` steps; None: not measured at this step.

    loss: mean training loss of the step, nats. validation_loss: mean over the validation examples, nats.
    validation_accuracy: share of the validation examples, 0 to 1.
    """

    step: int
    loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None


@dataclass(frozen=True)
class Curve:
    """The points of a run by ascending step. Private runs report none of these numbers, so their curve is empty."""

    points: tuple[CurvePoint, ...]

    @classmethod
    def of(cls, events: Iterable[JobView | Progress]) -> Curve:
        """Returns the curve of a job's events, as `client.jobs.watch` yields them.

        Training losses come from progress, validation from the result of a job that succeeded. If a run was continued
        on another device, the last number reported for a step counts.
        """
        losses: dict[int, float] = {}
        validation: dict[int, tuple[float, float]] = {}
        for event in events:
            if isinstance(event, Progress):
                if event.loss is not None:
                    losses[event.step] = event.loss
            elif event.result is not None:
                for evaluation in event.result.evaluations:
                    if evaluation.split == "validation" and evaluation.adapter == "current":
                        validation[evaluation.step] = (evaluation.loss, evaluation.correct / evaluation.total)
        steps = sorted(losses.keys() | validation.keys())
        return cls(tuple(CurvePoint(step, losses.get(step), *validation.get(step, (None, None))) for step in steps))

    def to_frame(self) -> DataFrame:
        """Returns the points as a data frame with index `step`. Raises ModuleNotFoundError without pandas."""
        try:
            from pandas import DataFrame
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"to_frame() needs pandas; {INSTALL_HINT}", name="pandas") from error
        columns = [field.name for field in fields(CurvePoint)]
        frame = DataFrame([asdict(point) for point in self.points], columns=columns)
        return frame.astype(dict.fromkeys(columns[1:], "float64")).set_index("step")

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draws training losses (left axis, nats) and validation accuracy (right axis) by step; returns the left axes.

        Validation losses are left out: a recipe with loss `candidates` trains another loss, of another scale.
        axes: where to draw; None: a new figure. Raises ModuleNotFoundError without matplotlib.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"plot() needs matplotlib; {INSTALL_HINT}", name="matplotlib") from error
        if axes is None:
            axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")[1]
        right_axes = axes.twinx()
        loss_points = [(point.step, point.loss) for point in self.points if point.loss is not None]
        accuracy_points = [
            (point.step, point.validation_accuracy) for point in self.points if point.validation_accuracy is not None
        ]
        axes.plot(
            [step for step, _ in loss_points], [loss for _, loss in loss_points], marker=".", label="training loss"
        )
        steps, accuracies = [step for step, _ in accuracy_points], [accuracy for _, accuracy in accuracy_points]
        right_axes.plot(steps, accuracies, color="tab:green", marker="s", label="validation accuracy")
        axes.set(xlabel="step", ylabel="training loss (nats)")
        right_axes.set(ylabel="validation accuracy", ylim=(0, 1.02))
        lines = [*axes.lines, *right_axes.lines]
        right_axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
        return axes
