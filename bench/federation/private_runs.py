"""What privacy of examples costs each estimator, at a small and at a large D: SmolLM2-135M, movie reviews.

Every run trains on the same EXAMPLES sentences with the agent's trainer, once without privacy and once with epsilon
EPSILON at delta DELTA for the whole run: `gradient` clips the gradient of each example in D dimensions, `directional`
its q projections, and `replay` its q differences of losses. Rate and C are chosen on validation sentences with one
seed; the claims are differences of means over SEEDS on test sentences. Accuracy alone counts, so runs go two at a time,
and those that `--keep` has are not repeated.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from bench.end_to_end.contender_runner import ContenderRunner
from bench.programs import MOVIES, compile_cold, smollm2_recipe
from bench.result import Claims, Measurement, Row, notes
from bench.runner import load_or_compute
from shared.canonical import sha256_hex
from shared.federation.accounting import noise_for
from shared.privacy import ExamplePrivacy
from shared.recipe import TARGETS
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from shared.zo.lora import load_adapter
from simulation.shards import Shard
from simulation.worker import LocalTask, WorkerConfig, worker

EPSILON, DELTA = 2.0, 1e-5
EXAMPLES, STEPS, BATCH = 900, 80, 8
HELD_OUT = 100  # of the training sentences; a run without privacy is measured on them before and after
TEST_SENTENCES, SEEDS, PROCESSES = 400, 3, 2
SMALL: dict[str, Any] = {"targets": ("v_proj", "o_proj", "down_proj"), "rank": 1, "alpha": 8}
LARGE: dict[str, Any] = {"targets": TARGETS, "rank": 8}
COMMON: dict[str, Any] = {"layers": "last:8", "loss": "candidates", "sequence_length": 36, "precision": "int8"}
COMMON |= {"effective_batch": BATCH}


@dataclass(frozen=True)
class Form:
    """An estimator with the grids that its settings are chosen from. clips: C, in the estimator's unit."""

    recipe: dict[str, Any]
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    eps: float | None = None


FORMS = {
    "gradient": Form({"estimator": "gradient"}, (1e-3, 3e-3), (0.1, 1.0)),
    "directional": Form({"estimator": "directional", "queries": 256, "optimizer": "sgd"}, (1e-3, 4e-3), (1.0, 10.0)),
    "replay": Form({"estimator": "replay", "queries": 4}, (1e-3, 4e-3), (0.02, 0.1), 2e-2),
}


@dataclass(frozen=True)
class Trial:
    """The settings of one run. clip: None without privacy."""

    rate: float
    clip: float | None
    seed: int


def measure(quick: bool, directory: Path) -> Measurement:
    """Returns a row of each run, and what privacy costs. quick: the first form at the small D, a few steps."""
    rows: list[Row] = []
    claims: Claims = {}
    sizes = {"small": SMALL} if quick else {"small": SMALL, "large": LARGE}
    forms = dict(list(FORMS.items())[:1]) if quick else FORMS
    for (size, settings), (name, form) in product(sizes.items(), forms.items()):
        notes.print(f"  {name}, {size} D")
        runs = _measure_form(directory, form, settings, quick)
        rows += [{"what": "private run", "estimator": name, **row} for row in runs]
        plain, private = (
            mean(row["accuracy"] for row in runs if row["split"] == "test" and (row["clip"] is None) is is_plain)
            for is_plain in (True, False)
        )
        claims |= {
            f"{name}_{size}_d_accuracy": plain,
            f"{name}_{size}_d_private_accuracy": private,
            f"{name}_{size}_d_private_cost_points": 100 * (plain - private),
        }
    return rows, claims


def _measure_form(directory: Path, form: Form, settings: dict[str, Any], quick: bool) -> list[Row]:
    recipe = COMMON | settings | form.recipe
    if settings is SMALL:  # a rank of 1 needs an A from data: of product reviews, which are public
        recipe["calibration"] = sha256_hex(ContenderRunner(directory).calibration().read_bytes())
    plain, private = (_program(directory, recipe | privacy) for privacy in ({}, {"privacy": "clipped"}))
    run = partial(_run, directory, plain, private, form.eps, quick)
    trials = [Trial(rate, clip, 0) for clip in (None, *form.clips) for rate in form.rates]
    rows = run("validation", trials)
    chosen: list[Trial] = []
    for is_plain in (True, False):
        row = max((row for row in rows if (row["clip"] is None) is is_plain), key=itemgetter("accuracy"))
        chosen += [Trial(row["lr"], row["clip"], seed) for seed in range(1 if quick else SEEDS)]
    return rows + run("test", chosen)


def _program(directory: Path, settings: dict[str, Any]) -> Path:
    recipe = smollm2_recipe(**settings)
    calibration = None if recipe.calibration is None else ContenderRunner(directory).calibration()
    return compile_cold(recipe, directory / "programs" / recipe.id[:24], calibration=calibration).directory


def _run(
    directory: Path, plain: Path, private: Path, eps: float | None, quick: bool, split: str, trials: Sequence[Trial]
) -> list[Row]:
    data = _write_data(directory / "private" / split, split)
    task = named_task("sst2").model_dump_json()
    programs = [plain if trial.clip is None else private for trial in trials]
    configs = [WorkerConfig(program, (data,), task, TEST_SENTENCES, 1, directory / "log") for program in programs]
    kept_row = partial(_kept_row, eps, split, 4 if quick else STEPS)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return list(pool.map(kept_row, configs, trials))


def _write_data(directory: Path, split: str) -> Path:
    """Writes the training sentences, and those of a split under the name that a pool tests on."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, source, most in (("train", "train", EXAMPLES + HELD_OUT), ("test", split, TEST_SENTENCES)):
        lines = (MOVIES / f"{source}.jsonl").read_text().splitlines(keepends=True)[:most]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


def _kept_row(eps: float | None, split: str, steps: int, config: WorkerConfig, trial: Trial) -> Row:
    name = "-".join(map(str, (split, steps, trial.rate, trial.clip, trial.seed)))
    compute = partial(_train_and_test, eps, split, steps, config, trial)
    return dict(load_or_compute(config.program / "runs" / f"{name}.json", compute))


def _train_and_test(eps: float | None, split: str, steps: int, config: WorkerConfig, trial: Trial) -> Row:
    one = worker(config)
    rate, privacy = BATCH / EXAMPLES, None
    if trial.clip is not None:
        noise = noise_for(EPSILON, DELTA, rate, steps)
        privacy = ExamplePrivacy(clip=trial.clip, noise_multiplier=noise, delta=DELTA, sampling_rate=rate)
    training = TrainingSettings(
        steps=steps, lr=trial.rate, schedule="cosine", eps=eps, seed=trial.seed, evaluation_interval=1000
    )
    local_task = LocalTask(
        device=trial.seed,
        shard=Shard(tuple(range(EXAMPLES)), tuple(range(EXAMPLES, EXAMPLES + HELD_OUT))),
        start=np.zeros(one.manifest.size, np.float32),
        start_sha256=None,
        training=training,
        round=None,
        privacy=privacy,
        seed=trial.seed,
        faults=None,
    )
    output = one.train(local_task)
    accuracy = one.test(load_adapter(output.adapter, one.manifest.size)).accuracy
    noise_multiplier = None if privacy is None else privacy.sigma
    return {
        "split": split,
        "size_d": one.manifest.size,
        "lr": trial.rate,
        "clip": trial.clip,
        "seed": trial.seed,
        "sigma": noise_multiplier,
        "accuracy": accuracy,
    }
