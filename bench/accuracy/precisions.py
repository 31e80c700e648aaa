"""The part `precisions` of `bench accuracy`: exact gradients on 8 and on 4 bits, as the agent trains them.

The demo's recipe (the last 12 layers, seven targets, rank 8) on the movie reviews, in the native runner with its file
of packed weights. Steps are timed by turns; the memory is a run's peak, evaluations included.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from bench.programs import MOVIES, CompiledProgram, compile_cold, random_batch, smollm2_recipe
from bench.result import Measurement, Row, notes
from bench.runner import load_or_compute, ratio, time_by_turns
from bench.tiny import plan_of, train
from device_agent.executors.program import Rates, TrainingProgram
from shared.recipe import TARGETS, Precision
from shared.training_settings import TrainingSettings

PRECISIONS: tuple[Precision, ...] = ("int8", "int4")
SETTINGS: dict[str, Any] = {
    "estimator": "gradient",
    "targets": TARGETS,
    "rank": 8,
    "layers": "last:12",
    "queries": 1,
    "sequence_length": 36,
}
STEPS, LR, ROUNDS = 80, 3e-3, 12
SEEDS = (0, 1, 2)


def precisions(directory: Path, quick: bool) -> Measurement:
    """Returns a row of each run and each step time, and claims. directory: of programs and finished rows."""
    programs = {
        precision: compile_cold(smollm2_recipe(**SETTINGS, precision=precision), directory / precision)
        for precision in PRECISIONS
    }
    rows: list[Row] = [
        dict(load_or_compute(directory / f"{name}-{seed}.json", partial(_run, program, directory, name, seed, quick)))
        for seed in SEEDS[: 1 if quick else None]
        for name, program in programs.items()
    ]
    opened = {name: program.serve() for name, program in programs.items()}
    seconds = time_by_turns(
        2 if quick else ROUNDS, {name: partial(_step, programs[name], opened[name]) for name in PRECISIONS}
    )
    for program in opened.values():
        program.close()

    def mean(precision: Precision, key: str) -> float:
        return statistics.mean(float(row[key]) for row in rows if row["precision"] == precision)

    files = {name: sum(program.size(role) for role in ("program", "weights")) for name, program in programs.items()}
    return rows, {
        **{f"gradient_accuracy_{name}": mean(name, "accuracy") for name in PRECISIONS},
        **{f"gradient_peak_bytes_{name}": mean(name, "peak_rss_bytes") for name in PRECISIONS},
        **{f"gradient_files_bytes_{name}": float(size) for name, size in files.items()},
        "gradient_int4_peak_ratio": mean("int4", "peak_rss_bytes") / mean("int8", "peak_rss_bytes"),
        "gradient_int4_step_ratio": 1 / ratio(seconds["int8"], seconds["int4"]),
    }


def _step(program: CompiledProgram, opened: TrainingProgram, number: int) -> None:
    recipe, vocabulary = program.recipe, program.manifest.shape.vocabulary
    opened.gradient_step(random_batch(recipe, vocabulary, recipe.sequence_length, number), Rates(LR))


def _run(program: CompiledProgram, directory: Path, precision: Precision, seed: int, quick: bool) -> Row:
    steps = 2 if quick else STEPS
    training = TrainingSettings(
        steps=steps,
        lr=LR,
        schedule="cosine",
        seed=seed,
        evaluation_interval=steps // 2,
        validation_limit=8 if quick else 100,
        test_limit=8 if quick else None,
    )
    result = train(plan_of(program, MOVIES, training), directory / f"{precision}-{seed}")
    row = {
        "precision": precision,
        "seed": seed,
        "zero_shot": result.before_accuracy,
        "accuracy": result.tuned_accuracy,
        "peak_rss_bytes": result.peak_rss_bytes,
        "train_seconds": result.train_seconds,
    }
    notes.print(f"{precision}, seed {seed}: {row}")
    return row
