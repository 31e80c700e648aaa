"""What `bench variance` measured, as tables, plots, rows and claims."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.choices_of_a import captured, most_captured
from bench.estimator import alignment, alignment_with_mean, batch_variance, direction_variance
from bench.gradients import LayerSums
from bench.result import Cell, Plot
from bench.variance_judge import (
    EXAMPLES,
    PAIR,
    QUERIES,
    RANK,
    STEPS,
    VALUE,
    VALUE_OUT,
    Found,
    Judged,
    judge,
    said,
    slug,
)
from bench.variance_study import OWN_GRADIENTS, PROXY_GRADIENTS, RANDOM, RANKS, Directions, FiniteDifferences, Measured


def choices(found: Found, measured: Measured, own: LayerSums, names: Sequence[str], *, claimed: bool) -> None:
    """A's choice. own: of the user's training examples; names: of the user's data and of the proxy."""
    lines: list[tuple[Cell, ...]] = []
    best: dict[str, list[tuple[float, float]]] = {}
    bars: dict[str, list[tuple[float, float]]] = {}
    ranks = (16, 4, 1)
    most = {module.name: most_captured(own.gradients[module.name], RANK) for module in measured.modules}
    for targets in (PAIR, VALUE):
        layers = [module.name for module in measured.modules if module.target in targets]
        for rank in ranks:
            for at, name in enumerate(measured.recorder.names):
                one = judge(measured, name, rank, targets)
                held = judge(measured, OWN_GRADIENTS, rank, targets).moments.signal
                columns = measured.recorder.columns(name)
                let_through = sum(captured(columns[layer][:, :rank], own.gradients[layer]) for layer in layers)
                share = let_through / sum(float(most[layer][rank - 1]) for layer in layers)
                lines.append(
                    (
                        said(targets),
                        rank,
                        name,
                        one.size,
                        one.moments.signal,
                        share,
                        one.moments.signal / held if held > 0 else None,
                        one.moments.effective_dimension,
                        one.cosine_squared,
                        one.steps_by_size,
                        one.steps(),
                    )
                )
                if targets == PAIR:
                    best.setdefault(name, []).append((rank, share))
                    steps = one.steps()
                    if isinstance(steps, float):
                        bars.setdefault(f"rank {rank}", []).append((at, steps))
                    if claimed:
                        found.claim(f"energy_of_best_{slug(name)}_r{rank}", share)
                        found.claim(f"predicted_steps_{slug(name)}_r{rank}", steps)
    key = names[0].replace(" ", "-")
    found.table(
        f"choices-{key}",
        f"A's choice, {names[0]} (proxy: {names[1]})",
        (
            "targets",
            "rank",
            "A",
            "D",
            "|g|^2",
            "of best",
            "of own gradients'",
            "effective dimension",
            "E cos^2",
            "steps (D / |g|^2)",
            "steps (curvature)",
        ),
        lines,
        "Every A has the same Frobenius norm, that of the default's. |g|^2: of B's mean gradient over held-out "
        "examples, its sampling noise taken out. Of best: of the user's own training examples' mean gradient, what A "
        "lets through over what the best A of orthogonal columns could, sampling noise counted in both. Of own "
        "gradients': |g|^2 over that of the A which the user's labelled training examples give. Proxy: chosen from "
        "data that are not the user's. E cos^2: of a step's estimate and g. " + STEPS,
    )
    found.plots += [
        Plot(
            name=f"energy-{key}",
            title=f"What A lets through of the gradient, {names[0]}",
            x="rank",
            y="share of the best possible",
            series={name: tuple(sorted(points)) for name, points in best.items()},
            log_x=True,
        ),
        Plot(
            name=f"steps-{key}",
            title=f"Predicted steps over the default's, {names[0]}",
            x="A",
            y="steps, relative",
            series={name: tuple(points) for name, points in bars.items()},
            kind="bars",
            groups=tuple(measured.recorder.names),
            log_y=True,
        ),
    ]


def ranks(found: Found, measured: Measured) -> None:
    """Random A by rank, at equal energy and at the recipe's alpha."""
    lines = []
    for rank in RANKS:
        one = judge(measured, RANDOM, rank, PAIR)
        lines.append(
            (
                rank,
                one.size,
                one.moments.signal,
                one.moments.effective_dimension,
                one.cosine_squared,
                direction_variance("rademacher", QUERIES, one.size),
                one.steps_by_size,
                one.steps(),
            )
        )
    found.table(
        "ranks",
        "Random A by rank",
        (
            "rank",
            "D",
            "|g|^2",
            "effective dimension",
            "E cos^2",
            "variance, q = 4",
            "steps (D / |g|^2)",
            "steps (curvature)",
        ),
        lines,
        "q_proj and v_proj, all layers; every rank's A has the Frobenius norm of the default's. Variance: of the "
        "estimate around its batch's gradient, over |g_E|^2, in closed form. " + STEPS,
    )


def targets(found: Found, measured: Measured) -> None:
    """Target modules and layers, random A and proxy gradients' beside each other."""
    linears = tuple(dict.fromkeys(module.target for module in measured.modules))
    settings: list[tuple[Sequence[str], str]] = [
        (some, layers) for some in (PAIR, VALUE, VALUE_OUT, linears) for layers in ("all", "last:50%", "last:25%")
    ]
    settings += [((one,), "all") for one in linears if one not in VALUE]
    lines = []
    for some, layers in settings:
        cells: list[Cell] = [said(some) if len(some) < len(linears) else "all linear", layers]
        for name in (RANDOM, PROXY_GRADIENTS):
            for rank in (16, 4):
                one = judge(measured, name, rank, some, layers)
                cells += [one.moments.effective_dimension, one.steps_by_size, one.steps()]
        one = judge(measured, RANDOM, RANK, some, layers)
        lines.append([*cells[:2], one.size, one.moments.signal, *cells[2:]])
    heads = [
        f"{what}: {name}, r = {rank}"
        for name in ("random", "proxy gradients")
        for rank in (16, 4)
        for what in ("effective dimension", "steps (D / |g|^2)", "steps (curvature)")
    ]
    found.table(
        "targets",
        "Targets and layers",
        ("targets", "layers", "D, r = 16", "|g|^2", *heads),
        lines,
        "The same |sA|_F for every layer; |g|^2 of random A, rank 16. Fewer layers also make a step cheaper, "
        "which is not counted here. " + STEPS,
    )


def split(found: Found, measured: Measured) -> None:
    """The paper's q and E at q E = 16: noise of directions against noise of the batch."""
    lines: list[tuple[Cell, ...]] = []
    for name, rank in ((RANDOM, 16), (PROXY_GRADIENTS, 16), (PROXY_GRADIENTS, 4)):
        one = judge(measured, name, rank, PAIR)
        own = Judged(one.moments, one.size, (one.moments, one.size))
        for queries in (1, 2, 4, 8, 16):
            examples = 16 // queries
            batch = batch_variance(one.moments, examples)
            directions = direction_variance("rademacher", queries, one.size) * (1 + batch)
            cosine = alignment_with_mean(queries, one.size, 1 / (1 + batch))
            lines.append(
                (f"{name}, r = {rank}", queries, examples, directions, batch, cosine, own.steps(queries, examples))
            )
            if (name, queries) == (RANDOM, QUERIES):
                found.claim("batch_noise_share_q4", batch / (batch + directions))
                found.claim("batch_variance_e4", batch)
    found.table(
        "split",
        "q and E at q E = 16",
        ("A", "q", "E", "direction noise", "batch noise", "E cos^2", "steps over q = 4"),
        lines,
        "q_proj and v_proj, all layers; Rademacher, the same E examples on every path. Noise: E |estimate - "
        "batch's gradient|^2 and E |batch's gradient - g|^2, over |g|^2. Steps: by curvature, for the same A.",
    )


def losses(found: Found, candidates: Measured, full: Measured) -> None:
    """The loss over the candidates against the paper's, over the vocabulary, both of the same random A."""
    lines = []
    names = candidates.names(PAIR, range(10**6))
    size = candidates.size(RANK, names)
    aim = candidates.recorder.moments(RANDOM, RANK, names)
    for loss, measured in (("candidates", candidates), ("full", full)):
        one = measured.recorder.moments(RANDOM, RANK, names)
        product = candidates.recorder.product(measured.recorder, RANDOM, RANK, names)
        cosine = product / np.sqrt(one.signal * aim.signal) if one.known and aim.known else None
        squared = one.signal + one.noise / EXAMPLES
        steps = (aim.signal**2 / (aim.signal + aim.noise / EXAMPLES)) / (product**2 / squared)
        batch = batch_variance(one, EXAMPLES) if one.known else None
        lines.append((loss, size, one.signal, batch, one.effective_dimension, cosine, steps))
        if loss == "full" and cosine is not None:
            found.claim("cosine_full_with_candidates", cosine)
            found.claim("predicted_steps_full_loss", steps)
    found.table(
        "losses",
        "The loss over candidates and over the vocabulary",
        (
            "loss",
            "D",
            "|g|^2",
            "batch noise, E = 4",
            "effective dimension",
            "cosine with candidates'",
            "steps for the candidates' loss",
        ),
        lines,
        "Random A, rank 16, q_proj and v_proj. Steps: what it takes to lower the candidates' loss by as much when "
        "steps follow the one or the other, direction noise alone deciding the best learning rate; 1 is the "
        "candidates' own.",
    )


def queries(found: Found, kinds: Sequence[Directions], gradient: np.ndarray, mean: np.ndarray) -> None:
    """q and the kind of noise, measured and in closed form."""
    size = len(gradient)
    share = float((gradient @ mean) ** 2 / ((gradient @ gradient) * (mean @ mean)))
    lines: list[tuple[Cell, ...]] = []
    for kind in kinds:
        for q, measured in kind.alignment.items():
            lines.append(
                (
                    kind.noise,
                    q,
                    measured,
                    alignment(q, size),
                    kind.alignment_with_mean[q],
                    alignment_with_mean(q, size, share),
                    kind.variance[q],
                    direction_variance(kind.noise, q, size),
                )
            )
        over = [measured / alignment(q, size) for q, measured in kind.alignment.items()]
        found.claim(f"alignment_over_theory_{kind.noise}", float(np.mean(over)))
        over = [value / direction_variance(kind.noise, q, size) for q, value in kind.variance.items()]
        found.claim(f"variance_over_theory_{kind.noise}", float(np.mean(over)))
    found.table(
        "queries",
        "q and the kind of noise",
        (
            "noise",
            "q",
            "cos^2 with g_E",
            "q / (D + q - 1)",
            "cos^2 with g",
            "predicted",
            "variance / |g_E|^2",
            "(D + 1) / q or (D - 1) / q",
        ),
        lines,
        f"Default recipe, D = {size:,}; one batch of 16 held-out examples, g_E its gradient, g that of many "
        f"training examples (cos^2 of the two {share:.3g}). Slopes along directions are exact, by autograd: what "
        "finite differences add stands in the table of precisions. q / (D + q - 1) is exact for Gaussian directions; "
        "variance is the paper's O(d / q).",
    )
    theory = {q: alignment(q, size) for q in kinds[0].alignment}
    found.plots.append(
        Plot(
            name="alignment",
            title="Alignment of the estimate with its batch's gradient",
            x="q",
            y="mean cos^2",
            series={kind.noise: tuple(kind.alignment.items()) for kind in kinds}
            | {"q / (D + q - 1)": tuple(theory.items())},
            log_x=True,
            log_y=True,
        )
    )


def precisions(found: Found, measured: Sequence[FiniteDifferences], moments: Measured, count: int) -> None:
    """Finite differences in each precision against exact slopes."""
    lines: list[tuple[Cell, ...]] = []
    for one in measured:
        lines.append((one.precision, one.eps, one.correlation, one.slope, one.variance, one.curvature))
        found.claim(f"slope_correlation_{slug(one.precision)}", one.correlation)
    trace = judge(moments, RANDOM, RANK, PAIR).moments.total
    found.claim("curvature_over_second_moment", measured[0].curvature / trace)
    found.table(
        "precisions",
        "Finite differences by precision",
        ("precision", "eps", "correlation", "slope", "variance / |g_E|^2", "tr H"),
        lines,
        f"Default recipe; {count} Rademacher directions on two batches of 4, against float32's exact slopes. "
        "Weights and activations are rounded in PyTorch by the compiler's own rounding; compiled programs are compared "
        "by `bench precision`. Variance: mean g^2, 1 if exact. tr H: the mean of z^T H z by second differences; the "
        f"second moment of examples' gradients, which stands for it in predictions, has trace {trace:.3g}.",
    )
