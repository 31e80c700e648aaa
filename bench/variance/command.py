"""`bench variance`: what a zeroth-order step sees of the gradient, and which choices should need fewer steps.

SmolLM2-135M in PyTorch, where autograd gives the gradient that directions only sample. Everything is measured at B = 0;
curvature is taken from the second moment of examples' gradients (`bench.variance.estimator.descent`). It only predicts;
`bench end-to-end` measures.
"""

from dataclasses import dataclass
from typing import get_args

from bench.programs import MOVIES, PRODUCTS, model_file
from bench.result import Claims, Measured, Row, notes, write
from bench.runner import JsonFile, Quick
from bench.variance import findings
from bench.variance.data import DataSet, open_bench
from bench.variance.study import (
    RANDOM,
    batch_gradient,
    choices_for,
    directions_of,
    finite_differences,
    mean_gradient,
    moments_of,
    sums_of,
    target_choices,
)
from server.compiler.model.quantization import check_precision
from shared.errors import InvalidRecipe
from shared.recipe import Precision
from shared.task_templates import named_task


@dataclass(frozen=True)
class Effort:
    """Sample sizes. examples: of each data set and split. directions: for q. differences: for precisions, per batch."""

    examples: int
    directions: int
    differences: int


QUICK, PLAIN = Effort(64, 256, 8), Effort(256, 512, 32)


def variance(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Variance and alignment of gradient estimates by q, rank, noise, layers, loss, precision, and A's choice."""
    task = named_task("sst2")
    sets = DataSet("movies", MOVIES, task), DataSet("products", PRODUCTS, task)
    write(json_file, *measure(str(model_file()), sets, QUICK if quick else PLAIN))


def measure(base: str, sets: tuple[DataSet, DataSet], effort: Effort, sequence_length: int = 64) -> Measured:
    """Returns all tables and claims. sets: the user's data, and the proxy of other people's."""
    rows: list[Row] = []
    claims: Claims = {}

    def add(found: Measured) -> None:
        rows.extend(found[0])
        claims.update(found[1])

    notes.print("opening the model")
    bench = open_bench(base, sets, sequence_length)
    train = [bench.examples(one, "train", effort.examples) for one in sets]
    test = [bench.examples(one, "test", effort.examples) for one in sets]

    notes.print("gradients of the training examples of both data sets")
    own, other = (sums_of(bench, examples) for examples in train)
    notes.print("choices of A on held-out examples")
    first, targets = moments_of(bench, test[0], choices_for(bench, own, other), target_choices(bench, other))
    add(findings.choices(first, own, sets[0].name, claimed=True))
    add(findings.targets(targets))
    (second,) = moments_of(bench, test[1], choices_for(bench, other, own))
    add(findings.choices(second, other, sets[1].name, claimed=False))

    if bench.recipe.loss == "candidates":
        notes.print("the loss over the full vocabulary")
        same = {RANDOM: targets.recorder.columns(RANDOM)}
        (whole,) = moments_of(bench.with_loss("full"), test[0], same)
        add(findings.losses(targets, whole))

    notes.print("directions")
    batches = bench.batches(test[0])[:2]
    gradient = batch_gradient(bench, batches[0])
    mean = mean_gradient(bench, own, len(train[0]))
    kinds = [directions_of(noise, gradient, mean, effort.directions) for noise in ("gaussian", "rademacher")]
    add(findings.queries(kinds, gradient, mean))

    # The paper's E: a batch's size decides what its gradient is, not how well differences approximate it.
    few = [tuple(array[: findings.EXAMPLES] for array in batch) for batch in batches]
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
    add(findings.precisions(differences, first))
    return rows, claims
