"""The part `start` of `bench feedback`: what a job with start `auto` saves, on movie reviews.

The candidates are adapters of product reviews. The device chooses among them and B = 0 by its own code, on validation
records, and trains on movie reviews from its choice; another run trains from B = 0. `examples` is the number of movie
reviews trained until 80 % of held-out ones are right, to the next evaluation; all of the run if they never are. The
rate was chosen on validation records, for the run from B = 0.
"""

import shutil
import statistics
from functools import partial
from pathlib import Path

import numpy as np

from bench.programs import MOVIES, PRODUCTS, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Measurement, Row
from bench.runner import rows_of_seeds
from bench.tiny import plan_of, train
from bench.topics import LR, SETTINGS
from device_agent.training.evaluation import best_b
from shared.canonical import file_sha256
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from shared.zo.lora import load_adapter

TASK = named_task("sst2")
TARGET = 0.8
STEPS, INTERVAL = 30, 2
CANDIDATE_STEPS = (10, 40)
CHOICE_RECORDS, HELD_OUT = 100, 200


def starts(directory: Path, quick: bool) -> Measurement:
    """Returns the runs of each seed, and the ratio of the examples that they need."""
    program = compile_cold(smollm2_recipe(**SETTINGS), directory / "topics-program")
    rows = rows_of_seeds(directory / "start", quick, partial(_runs, program, directory))
    from_zero, auto = (statistics.mean(row[start] for row in rows) for start in ("B = 0", "auto"))
    return rows, {
        "start_examples": from_zero,
        "start_auto_examples": auto,
        "start_examples_ratio": auto / from_zero,
    }


def _runs(program: CompiledProgram, parent: Path, seed: int, quick: bool) -> Row:
    """Trains the candidates, chooses one, and trains from both starts; returns the examples that each needs."""
    directory = parent / f"start-{seed}"
    directory.mkdir(exist_ok=True)
    data = directory / "data"  # its validation records, which choose nothing here, are held-out reviews
    data.mkdir(exist_ok=True)
    shutil.copy(MOVIES / "train.jsonl", data)
    shutil.copy(MOVIES / "test.jsonl", data / "validation.jsonl")
    candidates = []
    for steps in CANDIDATE_STEPS[: 1 if quick else None]:
        settings = TrainingSettings(steps=2 if quick else steps, lr=LR, seed=seed, validation_limit=8, test_limit=1)
        path = directory / f"products-{steps}"
        train(plan_of(program, PRODUCTS, settings, task=TASK), path)
        candidates.append(path / "last.safetensors")
    size = program.manifest.size
    starts = [np.zeros(size, np.float32), *(load_adapter(path.read_bytes(), size) for path in candidates)]
    runtime = program.serve()
    chosen = best_b(
        runtime,
        program.examples("validation")[: 8 if quick else CHOICE_RECORDS],
        program.recipe,
        starts,
        dynamic=program.manifest.dynamic_length,
    )
    runtime.close()
    settings = TrainingSettings(
        steps=2 if quick else STEPS,
        lr=LR,
        seed=seed,
        evaluation_interval=INTERVAL,
        validation_limit=8 if quick else HELD_OUT,
    )
    row: Row = {"seed": seed, "chosen": chosen}
    for start in ("B = 0", "auto"):
        plan = plan_of(program, data, settings, task=TASK)
        if start == "auto" and chosen:
            path = candidates[chosen - 1]
            plan = plan.model_copy(update={"start": path, "start_sha256": file_sha256(path)})
        result = train(plan, directory / start.replace(" = ", ""))
        reached = [each.step for each in result.evaluations if each.accuracy >= TARGET]
        row[start] = program.recipe.effective_batch * min(reached, default=result.steps)
    return row
