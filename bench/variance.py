"""`bench variance`: what a zeroth-order step sees of the gradient, and which choices should need fewer steps.

SmolLM2-135M in PyTorch, where autograd knows the gradient that directions only sample. Everything is measured at B = 0;
curvature is taken from the second moment of examples' gradients (`bench.estimator.descent`). It predicts; `bench
end-to-end` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from bench import variance_tables as tables
from bench.drawing import png
from bench.programs import model_file
from bench.result import write
from bench.step import notes
from bench.variance_data import open_bench, review_sets
from bench.variance_study import (
    batch_gradient,
    choices_for,
    directions_of,
    finite_differences,
    mean_gradient,
    moments_of,
    sums_of,
    target_choices,
)
from server.compiler.quantization import check_precision
from shared.errors import InvalidRecipe
from shared.recipe import Precision


@dataclass(frozen=True)
class Effort:
    """How much is looked at. examples: of each data set and split. directions: for q. differences: for precisions."""

    examples: int
    directions: int
    differences: int  # on each of two batches


QUICK, PLAIN, FULL = Effort(64, 256, 8), Effort(256, 512, 32), Effort(768, 2048, 128)


def variance(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw into this directory")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="64 examples of each set")] = False,
    full: Annotated[bool, typer.Option("--full", help="768 examples of each set")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="where PyTorch runs")] = "cpu",
    task: Annotated[str, typer.Option(help="a shipped task's template")] = "sst2",
    data: Annotated[Path | None, typer.Option(help="its train.jsonl and test.jsonl; default: movie reviews")] = None,
    proxy_task: Annotated[str, typer.Option(help="the proxy's template")] = "sst2",
    proxy: Annotated[Path | None, typer.Option(help="data that are not the user's; default: product reviews")] = None,
    base: Annotated[
        str | None, typer.Option(help="a model's directory, .gguf file or Hugging Face id; default: SmolLM2-135M")
    ] = None,
    sequence_length: Annotated[int, typer.Option("--seq-len", min=8)] = 64,
) -> None:
    """Variance and alignment of gradient estimates by q, rank, noise, layers, loss, precision, and A's choice."""
    if quick and full:
        raise typer.BadParameter("--quick or --full, not both")
    effort = QUICK if quick else FULL if full else PLAIN
    sets = review_sets(task, data, proxy_task, proxy)
    notes.print("opening the model")
    bench = open_bench(base or str(model_file()), sets, sequence_length, device)
    train = [bench.examples(one, "train", effort.examples) for one in sets]
    test = [bench.examples(one, "test", effort.examples) for one in sets]
    names = [one.name for one in sets]
    found = tables.Found(bench.recipe.base.name)

    notes.print("gradients of the proxy's and of the user's training examples")
    own, other = (sums_of(bench, examples) for examples in train)
    notes.print("A chosen from them, seen by examples held out")
    first, targets = moments_of(bench, test[0], choices_for(bench, own, other), target_choices(bench, other))
    tables.choices(found, first, own, names, claimed=True)
    tables.ranks(found, first)
    tables.targets(found, targets)
    tables.split(found, first)
    (second,) = moments_of(bench, test[1], choices_for(bench, other, own))
    tables.choices(found, second, other, names[::-1], claimed=False)

    if bench.recipe.loss == "candidates":
        notes.print("the loss over the full vocabulary")
        (whole,) = moments_of(
            bench.with_loss("full"), test[0], {tables.RANDOM: targets.recorder.columns(tables.RANDOM)}
        )
        tables.losses(found, targets, whole)

    notes.print("directions")
    batches = bench.batches(test[0])[:2]
    gradient = batch_gradient(bench, batches[0])
    mean = mean_gradient(bench, own, len(train[0]))
    kinds = [directions_of(noise, gradient, mean, effort.directions) for noise in ("gaussian", "rademacher")]
    tables.queries(found, kinds, gradient, mean)

    # The paper's E: a batch's size decides what its gradient is, not how well differences find it.
    few = [tuple(array[: tables.EXAMPLES] for array in batch) for batch in batches]
    gradients = [batch_gradient(bench, batch) for batch in few]
    differences = []
    for precision in get_args(Precision):
        try:
            check_precision(precision, bench.shape)
        except InvalidRecipe as refused:
            notes.print(f"left out: {refused.detail}")
            continue
        notes.print(f"finite differences, {precision}")
        differences.append(finite_differences(bench, few, gradients, precision, effort.differences))
    tables.precisions(found, differences, first, effort.differences * len(few))
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
        for one in found.plots:
            (plot / f"variance-{one.name}.png").write_bytes(png(one))
    write(json_file, found.rows, found.claims, found.tables, found.plots)
