"""What `bench variance` measured, as rows and claims. Each row names its table.

Predicted steps are steps to a given small decrease of the loss, relative to the default recipe (random A, rank 16,
q_proj and v_proj of all layers, q = 4, E = 4), each at its own best learning rate; less is better. `steps_by_size` uses
D / |g|^2, that is, the size of the space and the gradient in it. `steps` uses `estimator.descent`, which includes
curvature. Both predict how fast training starts, not where it ends. |g|^2 is that of B's mean gradient over held-out
examples, without its sampling noise; every A has the Frobenius norm of the default's. cos^2 is that of a step's
estimate and g; variances and noises are relative to |g|^2, or to the batch's |g_E|^2 where a name says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.result import Claims, Row
from bench.variance.choices_of_a import captured, most_captured
from bench.variance.estimator import alignment, alignment_with_mean, batch_variance, descent, direction_variance
from bench.variance.gradients import LayerSums, Moments
from bench.variance.study import OWN_GRADIENTS, PROXY_GRADIENTS, RANDOM, Directions, FiniteDifferences, Measured
from shared.recipe import layer_indices

Findings = tuple[list[Row], Claims]
QUERIES, EXAMPLES, RANK = 4, 4, 16  # of the default recipe
PAIR, VALUE, VALUE_OUT = ("q_proj", "v_proj"), ("v_proj",), ("v_proj", "o_proj")


@dataclass(frozen=True)
class Judged:
    """One choice of A at one rank on some layers: its moments and D, beside the default's."""

    moments: Moments
    size: int
    default: tuple[Moments, int]

    def steps(self) -> float | None:
        """Returns the predicted steps; None if too few examples were seen to know the gradient."""
        here = descent(self.moments, QUERIES, EXAMPLES) if self.moments.known else 0.0
        return descent(self.default[0], QUERIES, EXAMPLES) / here if here > 0 else None

    def row(self) -> Row:
        """Returns the columns that most tables share."""
        known, (default, size) = self.moments.known, self.default
        share = 1 / (1 + batch_variance(self.moments, EXAMPLES)) if known else 0.0
        by_size = self.size / self.moments.signal / (size / default.signal) if known else None
        return {
            "d": self.size,
            "gradient_squared": self.moments.signal,
            "effective_dimension": self.moments.effective_dimension,
            "cos_squared": alignment_with_mean(QUERIES, self.size, share),
            "steps_by_size": by_size,
            "steps": self.steps(),
        }


def judge(measured: Measured, name: str, rank: int, targets: Sequence[str], layers: str = "all") -> Judged:
    """Judges a choice of A on some targets and layers."""
    count = 1 + max(module.layer for module in measured.modules)

    def of(name: str, rank: int, targets: Sequence[str], layers: str) -> tuple[Moments, int]:
        names = measured.names(targets, layer_indices(layers, count))
        return measured.recorder.moments(name, rank, names), measured.size(rank, names)

    return Judged(*of(name, rank, targets, layers), of(RANDOM, RANK, PAIR, "all"))


def short(targets: Sequence[str]) -> str:
    """Returns targets for a row."""
    return ", ".join(target.removesuffix("_proj") for target in targets)


def slug(name: str) -> str:
    """Returns a name as a part of a claim's name."""
    kept = "".join(letter if letter.isalnum() else "_" for letter in name.replace("(the paper's)", ""))
    return "_".join(part for part in kept.split("_") if part)


def choices(measured: Measured, own: LayerSums, data: str, *, claimed: bool) -> Findings:
    """Compares the choices of A. own: sums of the training examples of `data`; the proxy is the other data set.

    energy_of_best: of the training examples' mean gradient, what A lets through over what the best A of orthogonal
    columns could, with sampling noise in both. of_own_gradients: |g|^2 over that of the A from the user's own labelled
    examples.
    """
    rows, claims = [], Claims()
    most = {module.name: most_captured(own.gradients[module.name], RANK) for module in measured.modules}
    for targets in (PAIR, VALUE):
        layers = [module.name for module in measured.modules if module.target in targets]
        for rank in (16, 4, 1):
            for name in measured.recorder.names:
                one = judge(measured, name, rank, targets)
                held = judge(measured, OWN_GRADIENTS, rank, targets).moments.signal
                columns = measured.recorder.columns(name)
                let_through = sum(captured(columns[layer][:, :rank], own.gradients[layer]) for layer in layers)
                share = let_through / sum(float(most[layer][rank - 1]) for layer in layers)
                of_own = one.moments.signal / held if held > 0 else None
                about = {"table": f"choices-{data}", "targets": short(targets), "rank": rank, "a": name}
                rows.append(about | one.row() | {"energy_of_best": share, "of_own_gradients": of_own})
                if claimed and targets == PAIR:
                    claims[f"energy_of_best_{slug(name)}_r{rank}"] = share
                    if (steps := one.steps()) is not None:
                        claims[f"predicted_steps_{slug(name)}_r{rank}"] = steps
    return rows, claims


def targets(measured: Measured) -> Findings:
    """Compares target modules and layers. Fewer layers also make a step cheaper, which is not counted here."""
    linears = tuple(dict.fromkeys(module.target for module in measured.modules))
    settings: list[tuple[Sequence[str], str]] = [
        (some, layers) for some in (PAIR, VALUE, VALUE_OUT, linears) for layers in ("all", "last:50%", "last:25%")
    ]
    settings += [((one,), "all") for one in linears if one not in VALUE]
    rows = []
    for some, layers in settings:
        who = short(some) if len(some) < len(linears) else "all linear"
        for name in (RANDOM, PROXY_GRADIENTS):
            for rank in (16, 4):
                about = {"table": "targets", "targets": who, "layers": layers, "a": name, "rank": rank}
                rows.append(about | judge(measured, name, rank, some, layers).row())
    return rows, {}


def losses(candidates: Measured, full: Measured) -> Findings:
    """Compares the loss over the candidates with the paper's, over the vocabulary, for the same random A of rank 16.

    steps: to lower the candidates' loss by as much when steps follow the one or the other loss, if only direction noise
    decides the best learning rate.
    """
    rows, claims = [], Claims()
    names = candidates.names(PAIR, range(10**6))
    aim = candidates.recorder.moments(RANDOM, RANK, names)
    for loss, measured in (("candidates", candidates), ("full", full)):
        one = measured.recorder.moments(RANDOM, RANK, names)
        product = candidates.recorder.product(measured.recorder, RANDOM, RANK, names)
        cosine = float(product / np.sqrt(one.signal * aim.signal)) if one.known and aim.known else None
        squared = one.signal + one.noise / EXAMPLES
        steps = (aim.signal**2 / (aim.signal + aim.noise / EXAMPLES)) / (product**2 / squared)
        row = {"table": "losses", "loss": loss, "d": candidates.size(RANK, names), "gradient_squared": one.signal}
        row["batch_noise_e4"] = batch_variance(one, EXAMPLES) if one.known else None
        row |= {"effective_dimension": one.effective_dimension, "cosine_with_candidates": cosine, "steps": steps}
        rows.append(row)
        if loss == "full" and cosine is not None:
            claims = {"cosine_full_with_candidates": cosine, "predicted_steps_full_loss": steps}
    return rows, claims


def queries(kinds: Sequence[Directions], gradient: np.ndarray, mean: np.ndarray) -> Findings:
    """Compares q and the kind of noise, measured and in closed form, on one batch of held-out examples.

    Slopes along directions are exact, by autograd. q / (D + q - 1) is exact for Gaussian directions; the variance is
    the paper's O(d / q).
    """
    rows, claims, size = [], Claims(), len(gradient)
    share = float((gradient @ mean) ** 2 / ((gradient @ gradient) * (mean @ mean)))
    for kind in kinds:
        new: list[Row] = [
            {
                "table": "queries",
                "noise": kind.noise,
                "q": q,
                "cos_squared_with_batch": measured,
                "cos_squared_with_batch_theory": alignment(q, size),
                "cos_squared_with_mean": kind.alignment_with_mean[q],
                "cos_squared_with_mean_theory": alignment_with_mean(q, size, share),
                "variance_over_batch": kind.variance[q],
                "variance_over_batch_theory": direction_variance(kind.noise, q, size),
            }
            for q, measured in kind.alignment.items()
        ]
        rows += new
        for claim, column in (("alignment", "cos_squared_with_batch"), ("variance", "variance_over_batch")):
            over = float(np.mean([row[column] / row[f"{column}_theory"] for row in new]))
            claims[f"{claim}_over_theory_{kind.noise}"] = over
    return rows, claims


def precisions(measured: Sequence[FiniteDifferences], moments: Measured) -> Findings:
    """Compares finite differences in each precision with float32's exact slopes.

    Weights and activations are rounded in PyTorch by the compiler's own rounding; `bench precision` compares compiled
    programs. curvature: tr H by second differences; predictions use the trace of the second moment of examples'
    gradients in its place.
    """
    rows = [{"table": "precisions", **vars(one)} for one in measured]
    claims = {f"slope_correlation_{slug(one.precision)}": one.correlation for one in measured}
    trace = judge(moments, RANDOM, RANK, PAIR).moments.total
    return rows, claims | {"curvature_over_second_moment": measured[0].curvature / trace}
