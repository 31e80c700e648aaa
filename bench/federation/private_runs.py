"""What privacy of examples costs each estimator, at a small and at a large D: SmolLM2-135M, movie reviews.

Every run trains on the same EXAMPLES sentences with the agent's trainer, once without privacy and once with epsilon
EPSILON at delta DELTA for the whole run: `gradient` clips the gradient of each example in D dimensions, `directional`
its q projections, and `replay` its q differences of losses. Rate and C are chosen on validation sentences with one
seed; the claims are differences of means over SEEDS on test sentences. Accuracy alone counts, so forms are measured
two at a time, each in a process of its own, and runs that `--keep` has are not repeated.
"""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Literal

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

EPSILON, DELTA = 8.0, 1e-5
EXAMPLES, STEPS, BATCH = 900, 60, 8
HELD_OUT = 50  # training sentences on which a run without privacy is measured before and after
SENTENCES = {"validation": 300, "test": 400}
SEEDS, PROCESSES = 3, 2
Size = Literal["small", "large"]
SIZES: dict[Size, dict[str, Any]] = {
    "small": {"targets": ("v_proj", "o_proj", "down_proj"), "rank": 1, "alpha": 8},
    "large": {"targets": TARGETS, "rank": 8},
}
COMMON: dict[str, Any] = {"layers": "last:8", "loss": "candidates", "sequence_length": 36, "precision": "int8"}
COMMON |= {"effective_batch": BATCH}


@dataclass(frozen=True)
class Form:
    """An estimator with the grids that its settings are chosen from. clips: C, in the estimator's unit.

    Under plain descent a small C asks for larger rates, so private runs have rates of their own.
    """

    recipe: dict[str, Any]
    rates: tuple[float, ...]
    private_rates: tuple[float, ...]
    clips: tuple[float, ...]
    eps: float | None = None


FORMS = {
    "gradient": Form({"estimator": "gradient"}, (3e-3, 1e-2, 3e-2), (3e-3, 1e-2, 3e-2), (1.0, 10.0)),
    "gradient_sgd": Form(
        {"estimator": "gradient", "optimizer": "sgd"}, (1.6e-2, 6.4e-2, 0.256), (1.6e-2, 6.4e-2, 0.256), (1.0, 10.0)
    ),
    "directional": Form(
        {"estimator": "directional", "queries": 256, "optimizer": "sgd"},
        (4e-3, 1.6e-2, 6.4e-2),
        (4e-3, 1.6e-2, 6.4e-2),
        (160.0, 640.0),
    ),
    "replay": Form({"estimator": "replay", "queries": 4}, (1e-3, 4e-3), (1e-3, 4e-3), (0.2, 0.8), eps=2e-2),
}


@dataclass(frozen=True)
class Trial:
    """The settings of one run. clip: None without privacy."""

    rate: float
    clip: float | None
    seed: int


def measure(quick: bool, directory: Path, size: Size) -> Measurement:
    """Returns a row of each run, and what privacy costs each form. quick: the first form, a few steps."""
    names = list(FORMS)[: 1 if quick else None]
    measurements = [FormMeasurement(directory, name, size, quick) for name in names]
    pool = _write_pool(directory / "private")
    ContenderRunner(directory).calibration()  # before two processes ask for it
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as executor:
        results = list(executor.map(partial(FormMeasurement.run, pool=pool), measurements))
    rows: list[Row] = []
    claims: Claims = {}
    for one, runs in zip(measurements, results, strict=True):
        rows += [{"what": "private run", "estimator": one.name, **row} for row in runs]
        plain, private = (
            mean(row["accuracy"] for row in runs if row["split"] == "test" and (row["clip"] is None) is is_plain)
            for is_plain in (True, False)
        )
        claims |= {
            f"{one.name}_{one.size}_d_accuracy": plain,
            f"{one.name}_{one.size}_d_private_accuracy": private,
            f"{one.name}_{one.size}_d_private_cost_points": 100 * (plain - private),
        }
    return rows, claims


@dataclass(frozen=True)
class Pool:
    """The data of all runs: the sentences of all splits in one file, and the indices in it of each split."""

    directory: Path
    splits: Mapping[str, tuple[int, ...]]


def _write_pool(directory: Path) -> Pool:
    directory.mkdir(parents=True, exist_ok=True)
    splits: dict[str, tuple[int, ...]] = {}
    lines: list[str] = []
    sizes = {"train": EXAMPLES + HELD_OUT, **SENTENCES}
    for split, most in sizes.items():
        sentences = (MOVIES / f"{split}.jsonl").read_text().splitlines(keepends=True)[:most]
        splits[split] = tuple(range(len(lines), len(lines) + len(sentences)))
        lines += sentences
    (directory / "train.jsonl").write_text("".join(lines))
    (directory / "test.jsonl").write_text(lines[0])  # unused; without this file, the pool would be split
    return Pool(directory, splits)


@dataclass(frozen=True)
class FormMeasurement:
    """All runs of a form at one D. name: of FORMS."""

    directory: Path
    name: str
    size: Size
    quick: bool

    def run(self, pool: Pool) -> list[Row]:
        """Returns the rows of the validation runs and of the test runs, without privacy first."""
        form, rows = FORMS[self.name], list[Row]()
        for privacy, clips, rates in (
            ({}, (None,), form.rates),
            ({"privacy": "clipped"}, form.clips, form.private_rates),
        ):
            program = self._program(form.recipe | privacy)
            notes.print(f"  {self.name}, {self.size} D, {'private' if privacy else 'without privacy'}")
            task = named_task("sst2").model_dump_json()
            config = WorkerConfig(program, (pool.directory,), task, 1, 1, self.directory / "log")
            kept_row = partial(_kept_row, config, pool, form.eps, 4 if self.quick else STEPS)
            trials = [Trial(rate, clip, 0) for clip, rate in product(clips, rates)]
            validated = [kept_row("validation", trial) for trial in trials]
            best = max(zip(validated, trials, strict=True), key=lambda pair: pair[0]["accuracy"])[1]
            seeds = range(1 if self.quick else SEEDS)
            rows += [*validated, *(kept_row("test", replace(best, seed=seed)) for seed in seeds)]
        return rows

    def _program(self, settings: dict[str, Any]) -> Path:
        values = COMMON | SIZES[self.size] | settings
        calibration = None
        if self.size == "small":  # a rank of 1 needs an A from data: of product reviews, which are public
            calibration = ContenderRunner(self.directory).calibration()
            values["calibration"] = sha256_hex(calibration.read_bytes())
        recipe = smollm2_recipe(**values)
        return compile_cold(recipe, self.directory / "programs" / recipe.id[:24], calibration=calibration).directory


def _kept_row(config: WorkerConfig, pool: Pool, eps: float | None, steps: int, split: str, trial: Trial) -> Row:
    name = "-".join(map(str, (split, steps, trial.rate, trial.clip, trial.seed)))
    compute = partial(_train_and_measure, config, pool, eps, steps, split, trial)
    return dict(load_or_compute(config.program / "runs" / f"{name}.json", compute))


def _train_and_measure(
    config: WorkerConfig, pool: Pool, eps: float | None, steps: int, split: str, trial: Trial
) -> Row:
    one = worker(config)
    rate, privacy = BATCH / EXAMPLES, None
    if trial.clip is not None:
        noise = noise_for(EPSILON, DELTA, rate, steps)
        privacy = ExamplePrivacy(clip=trial.clip, noise_multiplier=noise, delta=DELTA, sampling_rate=rate)
    training = TrainingSettings(
        steps=steps, lr=trial.rate, schedule="cosine", eps=eps, seed=trial.seed, evaluation_interval=1000
    )
    train = pool.splits["train"]
    local_task = LocalTask(
        device=trial.seed,
        shard=Shard(train[:EXAMPLES], train[EXAMPLES:]),
        start=np.zeros(one.manifest.size, np.float32),
        start_sha256=None,
        training=training,
        round=None,
        privacy=privacy,
        seed=trial.seed,
        faults=None,
    )
    output = one.train(local_task)
    metrics = one.measure(load_adapter(output.adapter, one.manifest.size), (pool.splits[split],))[0]
    return {
        "split": split,
        "size_d": one.manifest.size,
        "lr": trial.rate,
        "clip": trial.clip,
        "seed": trial.seed,
        "sigma": None if privacy is None else privacy.sigma,
        "accuracy": metrics.accuracy,
    }
