"""The part `topics` of `bench feedback`: a second job on another topic, and a run that is made to overfit.

One adapter tags an owner's reviews. Those of movies are tagged `terrible` or `great`; a second file has reviews of
products, tagged `returned` or `kept`. The task stays the same, and a field of each record says what it is about. An
adapter that sees only the second file learns to give its tags to every review.

first       movie reviews, from B = 0
rehearsed   product reviews, from the first adapter; 30 % of the examples are movie reviews
new-alone   the same without rehearsal
overfit     16 movie reviews at ten times the rate, from B = 0

`movies_change` is how many points the accuracy on held-out movie reviews changed from the start to the adapter. Rates
and steps were chosen on validation examples.
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from bench.programs import LAST_LAYERS, MOVIES, PRODUCTS, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Measurement, Row
from bench.runner import rows_of_seeds
from bench.tiny import plan_of, train
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import own_texts
from shared.canonical import file_sha256
from shared.task import Answer, Task
from shared.training_settings import TrainingSettings

SETTINGS = LAST_LAYERS | {"sequence_length": 64, "choices": 4}
TAGS = {"negative": " terrible", "positive": " great", "returned": " returned", "kept": " kept"}
TASK = Task(
    name="tags",
    prompt="{about} review: {text} It was",
    answers=tuple(Answer(text=text, labels=(label,)) for label, text in TAGS.items()),
)
PRODUCT_LABELS = {"negative": "returned", "positive": "kept"}
STEPS, SECOND_STEPS, LR = 60, 90, 2e-3
OVERFIT_RECORDS, OVERFIT_RATE = 16, 10
EARLIER = 200  # held-out movie reviews that a second run measures
VALIDATED, TESTED = 40, 100  # records of a run's own data set


def topics(directory: Path, quick: bool) -> Measurement:
    """Returns the runs of each seed, and means of what they lost."""
    program = compile_cold(smollm2_recipe(**SETTINGS), directory / "topics-program")
    rows: list[Row] = []
    for run in ("first", "rehearsed", "new-alone", "overfit"):
        rows += rows_of_seeds(directory / run, quick, partial(_run, program, directory, run))

    def mean(run: str, key: str) -> float:
        return statistics.mean(float(row[key] or 0) for row in rows if row["run"] == run)

    return rows, {
        "topics_first_movies_accuracy": mean("first", "accuracy_after"),
        "topics_overfit_movies_accuracy": mean("overfit", "accuracy_after"),
        "topics_rehearsed_movies_change": mean("rehearsed", "movies_change"),
        "topics_new_alone_movies_change": mean("new-alone", "movies_change"),
        "topics_rehearsed_products_accuracy": mean("rehearsed", "accuracy_after"),
        "topics_new_alone_products_accuracy": mean("new-alone", "accuracy_after"),
        "topics_first_reference_change": mean("first", "reference_change"),
        "topics_overfit_reference_change": mean("overfit", "reference_change"),
    }


def _run(program: CompiledProgram, directory: Path, name: str, seed: int, quick: bool) -> Row:
    """Trains once. The second runs continue the first adapter of the same seed, whose records they rehearse."""
    data, path = directory / f"{name}-data", directory / f"{name}-{seed}"
    overfit, second = name == "overfit", name in ("rehearsed", "new-alone")
    source = PRODUCTS if second else MOVIES
    data.mkdir(exist_ok=True)
    last = VALIDATED + OVERFIT_RECORDS if overfit else None
    _write_reviews(source / "train.jsonl", data / "train.jsonl", slice(VALIDATED, last))
    _write_reviews(source / "train.jsonl", data / "validation.jsonl", slice(VALIDATED))
    _write_reviews(source / "test.jsonl", data / "test.jsonl", slice(TESTED))
    steps = SECOND_STEPS if second else STEPS
    training = TrainingSettings(
        steps=2 if quick else steps,
        lr=LR * (OVERFIT_RATE if overfit else 1),
        schedule="linear",
        seed=seed,
        evaluation_interval=steps // 2,
        validation_limit=8 if quick else EARLIER,
        test_limit=8 if quick else None,
        rehearsal=0.0 if name == "new-alone" else 0.3,
    )
    changes: dict[str, Any] = {"reference_texts": own_texts()}
    if second:
        start, run = directory / f"first-{seed}" / "best.safetensors", RunDirectory(path)
        changes = {"start": start, "start_sha256": file_sha256(start)}
        path.mkdir(exist_ok=True)
        _write_reviews(MOVIES / "train.jsonl", run.rehearsed)
        _write_reviews(MOVIES / "test.jsonl", run.held_out)
    result = train(plan_of(program, data, training, task=TASK).model_copy(update=changes), path)
    before, after = result.earlier_accuracy_before, result.earlier_accuracy_after
    return {
        "run": name,
        "seed": seed,
        "accuracy_after": result.tuned_accuracy,
        "movies_change": None if before is None or after is None else 100 * (after - before),
        "reference_change": result.reference_loss_change,
    }


def _write_reviews(source: Path, path: Path, which: slice = slice(None)) -> None:
    """Writes some reviews of a file with what they are about, those of products with their own labels."""
    records = [json.loads(line) for line in source.read_text().splitlines()[which]]
    about, labels = ("Product", PRODUCT_LABELS) if source.parent == PRODUCTS else ("Movie", {})
    records = [
        {"about": about, "text": each["text"], "label": labels.get(each["label"], each["label"])} for each in records
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
