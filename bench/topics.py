"""The part `topics` of `bench feedback`: a second job on another topic, and a run that is made to overfit.

first       movie reviews, from B = 0
rehearsed   product reviews, from the first adapter; 30 % of the examples are movie reviews
new-alone   the same without rehearsal
overfit     16 movie reviews at ten times the rate, from B = 0

`movies_change` is how many points the accuracy on held-out movie reviews changed from the start to the adapter.
`held` says whether the reference gate holds the version by the default rule.
"""

import shutil
import statistics
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from bench.programs import MOVIES, PRODUCTS, CompiledProgram
from bench.result import Claims, Measurement, Row, notes
from bench.tiny import plan_of
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import find_runner
from device_agent.training.run import train_run
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import own_texts
from shared.canonical import file_sha256
from shared.recipe import TARGETS
from shared.registry import ApprovalRule
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings

SETTINGS: dict[str, Any] = {
    "estimator": "gradient",
    "targets": TARGETS,
    "rank": 8,
    "layers": "last:8",
    "precision": "int8",
    "effective_batch": 8,
    "sequence_length": 64,
}
STEPS, LR = 60, 1e-3
OVERFIT_RECORDS, OVERFIT_RATE = 16, 10
HELD_OUT = 200


def measure_topics(program: CompiledProgram, directory: Path, seeds: tuple[int, ...], quick: bool) -> Measurement:
    """Returns the runs of each seed, and means of what they lost."""
    few = directory / "few"
    shutil.copytree(MOVIES, few, dirs_exist_ok=True)
    _copy_lines(MOVIES / "train.jsonl", few / "train.jsonl", OVERFIT_RECORDS)
    rows: list[Row] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            rows.append(_run(program, root / "first", MOVIES, seed, quick))
            start = root / "first" / "best.safetensors"
            for run_name, share in (("rehearsed", 0.3), ("new-alone", 0.0)):
                rows.append(_run(program, root / run_name, PRODUCTS, seed, quick, start, share))
            rows.append(_run(program, root / "overfit", few, seed, quick))
    return rows, _claims(rows)


def _claims(rows: list[Row]) -> Claims:
    def mean(run: str, key: str) -> float:
        return statistics.mean(float(row[key] or 0) for row in rows if row["run"] == run)

    return {
        "topics_rehearsed_movies_change": mean("rehearsed", "movies_change"),
        "topics_new_alone_movies_change": mean("new-alone", "movies_change"),
        "topics_first_reference_change": mean("first", "reference_change"),
        "topics_overfit_reference_change": mean("overfit", "reference_change"),
        "topics_overfit_held": mean("overfit", "held"),
    }


def _copy_lines(source: Path, to: Path, count: int) -> None:
    with source.open() as file:
        to.write_text("".join(islice(file, count)))


def _run(
    program: CompiledProgram,
    path: Path,
    data: Path,
    seed: int,
    quick: bool,
    start: Path | None = None,
    rehearsal: float = 0.3,
) -> Row:
    """Trains once. start: the first adapter, whose records are rehearsed and measured."""
    run, overfit = RunDirectory(path), path.name == "overfit"
    training = TrainingSettings(
        steps=2 if quick else STEPS,
        lr=LR * (OVERFIT_RATE if overfit else 1),
        seed=seed,
        evaluation_interval=STEPS // 2,
        validation_limit=8 if quick else 60,
        test_limit=8 if quick else HELD_OUT,
        rehearsal=rehearsal,
    )
    changes: dict[str, Any] = {"reference_texts": own_texts()}
    if start is not None:
        changes |= {"start": start, "start_sha256": file_sha256(start)}
        path.mkdir()
        shutil.copy(MOVIES / "train.jsonl", run.rehearsed)
        _copy_lines(MOVIES / "test.jsonl", run.held_out, HELD_OUT)
    run.begin(plan_of(program, data, training, task=named_task("sst2")).model_copy(update=changes))
    result = train_run(run, RunnerLauncher(find_runner()), lambda _: None)
    before, after = result.earlier_accuracy_before, result.earlier_accuracy_after
    notes.print(f"{path.name}, seed {seed}: reference texts {result.reference_loss_change:+.1%}")
    return {
        "run": path.name,
        "seed": seed,
        "best_step": result.best_step,
        "accuracy_before": result.before_accuracy,
        "accuracy_after": result.tuned_accuracy,
        "movies_change": None if before is None or after is None else 100 * (after - before),
        "reference_change": result.reference_loss_change,
        "held": ApprovalRule().reference_objection(result) is not None,
        "seconds": result.seconds,
    }
