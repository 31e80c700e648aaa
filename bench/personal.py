"""`bench personal`: learning to write from one person's texts, on SmolLM2-135M-Instruct, in the native runner.

- completion: the next of a customer's reviews, after a prompt that says whether it praises; product reviews.
- style: documents of one author; Jane Austen's "Northanger Abbey", trained on its first chapters and tested on later
  ones.

Both are complete runs of the agent, from the plan to the adapter, by exact gradients and by forward passes only. The
losses are means over all answer tokens of the test split, on which no setting was chosen. `seconds` is the run's whole
time on the device, with the measurements before and after; compiling the program is not part of it.
"""

import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from bench.programs import MOVIES, PRODUCTS, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Claims, Measurement, Row
from bench.runner import JsonFile, Keep, Only, Quick, rows_of_seeds, run_parts
from bench.tiny import plan_of, train
from shared.recipe import TARGETS
from shared.task import Task
from shared.training_settings import TrainingSettings

NOVEL = MOVIES.parent / "northanger_abbey"
COMPLETION = Task(name="review", kind="completion", prompt="A {label} product review by a customer:\n", answer="{text}")
NOVEL_TASK = Task(name="novel", kind="text")
COMMON: dict[str, Any] = {"rank": 8, "layers": "last:8", "loss": "full", "choices": 1, "precision": "int8"}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gradient": {"estimator": "gradient", "targets": TARGETS, "effective_batch": 8},
    "replay": {"estimator": "replay", "targets": ("v_proj", "o_proj"), "effective_batch": 4, "queries": 4},
}


@dataclass(frozen=True)
class Experiment:
    """A data set, its task and the program's lengths. steps: by estimator."""

    data: Path
    task: Task
    lengths: dict[str, int]
    steps: dict[str, int]


# Rates and steps were chosen on validation examples.
RATES = {"gradient": 3e-3, "replay": 5e-3}
EXPERIMENTS = {
    "completion": Experiment(
        PRODUCTS,
        COMPLETION,
        {"sequence_length": 64, "answer_length": 48},
        {"gradient": 40, "replay": 60},
    ),
    "style": Experiment(
        NOVEL,
        NOVEL_TASK,
        {"sequence_length": 96, "answer_length": 95},
        {"gradient": 30, "replay": 30},
    ),
}


def personal(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Learn to write from one person's texts: the fall of the held-out loss and perplexity."""
    with tempfile.TemporaryDirectory() as name:
        run_parts({part: partial(learn, keep or Path(name), part) for part in EXPERIMENTS}, json_file, quick, only)


def learn(directory: Path, part: str, quick: bool) -> Measurement:
    """Returns the runs of each estimator and seed, and their means."""
    rows: list[Row] = []
    claims: Claims = {}
    drop = "loss_drop" if part == "completion" else "perplexity_drop"
    for estimator, settings in ESTIMATORS.items():
        name, experiment = f"{part}-{estimator}", EXPERIMENTS[part]
        program = compile_cold(smollm2_recipe(**(COMMON | settings | experiment.lengths)), directory / name)
        runs = rows_of_seeds(directory / name, quick, partial(_run, program, experiment))
        rows += runs
        suffix = "" if estimator == "gradient" else f"_{estimator}"
        claims[f"{part}_{drop}{suffix}"] = statistics.mean(row[drop] for row in runs)
        claims[f"{part}_seconds{suffix}"] = max(row["seconds"] for row in runs)
    return rows, claims


def _run(program: CompiledProgram, experiment: Experiment, seed: int, quick: bool) -> Row:
    """Trains once, in a directory of its own. The run is validated in its middle and at its end."""
    estimator = program.recipe.estimator
    steps = 2 if quick else experiment.steps[estimator]
    training = TrainingSettings(
        steps=steps,
        lr=RATES[estimator],
        seed=seed,
        schedule="cosine",
        evaluation_interval=steps // 2,
        validation_limit=40,
        test_limit=4 if quick else 100,
    )
    with tempfile.TemporaryDirectory() as name:
        result = train(plan_of(program, experiment.data, training, task=experiment.task), Path(name))
    if result.perplexities is None or result.token_loss_before is None or result.token_loss_after is None:
        raise typer.Exit(1)
    return {
        "estimator": estimator,
        "seed": seed,
        "loss_drop": 1 - result.token_loss_after / result.token_loss_before,
        "perplexity_drop": 1 - result.perplexities[1] / result.perplexities[0],
        "seconds": result.seconds,
    }
