"""The benefit of a cohort to a new user, and the cost of privacy: SmolLM2-135M, movie and product reviews.

The training sentences are split among 16 devices, eight with movies and eight with products;
four more users, two of each, are not part of it. A simulated cohort trains a shared adapter. Then the four
train on their own sentences alone, once from the cohort's adapter and once from zero, with the same settings and seed,
and are measured on the same test sentences along the way. All use the agent's trainer on the real program; the
claim is a ratio of steps, which does not depend on the machine's speed.

warm_start_step_ratio: the first measured number of steps at which the four from the cohort are right on as many
sentences, all together, as from zero at the end (or at its best, if that is more), over the steps from zero.
dp_cost_points: accuracy of the cohort's adapter less that of one whose devices' examples have epsilon 8 at delta 1e-5
over all rounds together, on the same test sentences, in points; otherwise equal settings, so that both see as many
examples a step on average.
"""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.programs import MOVIES, PRODUCTS, model_file
from bench.result import Measurement, notes
from shared.canonical import sha256_hex
from shared.federation.accounting import epsilon_of, noise_for, run_spending
from shared.privacy import ExamplePrivacy
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from simulation.records import Store
from simulation.session import Resources, SimulationOutcome, simulate
from simulation.settings import read_settings
from simulation.shards import Shard
from simulation.worker import LocalTask, Worker, WorkerConfig, worker

F32 = NDArray[np.float32]
# Directories of `cohort` and of `personal`, one for each source, as `simulation.pool` reads them.
Files = dict[str, list[Path]]
CORES = os.cpu_count() or 1
SOURCES = {"movies": MOVIES, "products": PRODUCTS}
DEVICES, PER_DEVICE, HELD_OUT = 16, 84, 4
USERS, PER_USER, TEST_SENTENCES = 2, 36, 120  # of each source
ROUND_TEST_SENTENCES = 40  # test sentences after each round; all of them at the end
ROUNDS, STEPS, LR = 6, 8, 2e-2
# The mean over 16 devices has a sixteenth of the variance of one, so the server can step further than they did.
SERVER_LR = 4.0
PERSONAL = TrainingSettings(steps=80, lr=1e-1, seed=77, evaluation_interval=10)
EPSILON, DELTA = 8.0, 1e-5
CLIP = 0.05  # nats: of single sentences before training, q = 4 differences had norms of 0.001 to 0.07
EFFECTIVE_BATCH = 4
RECIPE: dict[str, Any] = {
    "layers": "last:25%",
    "effective_batch": EFFECTIVE_BATCH,
    "loss": "candidates",
    "sequence_length": 40,
}


def warm_start(quick: bool, directory: Path) -> Measurement:
    """Returns no rows, and claims. directory: of programs and rounds."""
    files = _write_data(directory / "data")
    simulation = _cohort(directory, files, quick, None)
    task = named_task("sst2").model_dump_json()
    personal = Worker(WorkerConfig(directory / "program", tuple(files["personal"]), task, 1, CORES, directory / "log"))
    cohort_start = Store(directory / "plain").adapter(len(simulation.rounds) - 1, simulation.manifest.size)
    sums = {"cohort": Counter[int](), "zero": Counter[int]()}
    for name, start in (("cohort", cohort_start), ("zero", np.zeros_like(cohort_start))):
        for number, source in enumerate(SOURCES):
            for user in range(USERS):
                curve = _curve(personal, number, user, start, quick)
                notes.print(f"  user {user} of {source}: {curve} of {TEST_SENTENCES}")
                sums[name].update(curve)
    cohort, zero = (dict(sorted(sums[name].items())) for name in ("cohort", "zero"))
    last_step, target, total = max(zero), max(zero.values()), TEST_SENTENCES * USERS * len(SOURCES)
    steps_at_target = [step for step, correct in cohort.items() if correct >= target]
    return [], {
        "warm_start_step_ratio": min(steps_at_target) / last_step if steps_at_target else math.inf,
        "warm_start_accuracy": cohort[0] / total,
        "from_zero_accuracy": zero[last_step] / total,
        "untrained_accuracy": zero[0] / total,
    }


def privacy(quick: bool, directory: Path) -> Measurement:
    """Returns no rows, and the cost of privacy. directory: of programs and rounds."""
    steps = (2 if quick else ROUNDS) * STEPS
    rate = EFFECTIVE_BATCH / PER_DEVICE
    noise = noise_for(EPSILON, DELTA, rate, steps)
    example_privacy = ExamplePrivacy(clip=CLIP, noise_multiplier=noise, delta=DELTA, sampling_rate=rate)
    files = _write_data(directory / "data")
    cohorts = {
        name: _cohort(directory, files, quick, cohort_privacy)
        for name, cohort_privacy in (("plain", None), ("private", example_privacy))
    }
    accuracy = {name: _test_accuracy(directory, files, name, simulation) for name, simulation in cohorts.items()}
    return [], {
        "dp_cost_points": 100 * (accuracy["plain"] - accuracy["private"]),
        "dp_epsilon": epsilon_of([run_spending(example_privacy, steps)], DELTA),
        "dp_accuracy": accuracy["private"],
        "no_dp_accuracy": accuracy["plain"],
    }


def _test_accuracy(directory: Path, files: Files, name: str, simulation: SimulationOutcome) -> float:
    """Returns the accuracy of a cohort's adapter on all test sentences, with the program without privacy."""
    task = named_task("sst2").model_dump_json()
    config = WorkerConfig(
        directory / "program", tuple(files["cohort"]), task, TEST_SENTENCES * len(SOURCES), CORES, directory / "log"
    )
    flat = Store(directory / name).adapter(len(simulation.rounds) - 1, simulation.manifest.size)
    accuracy = worker(config).test(flat).accuracy
    notes.print(f"  {name}: {accuracy:.1%} of {TEST_SENTENCES * len(SOURCES)} test sentences")
    return accuracy


def _cohort(directory: Path, files: Files, quick: bool, example_privacy: ExamplePrivacy | None) -> SimulationOutcome:
    """Runs the cohort's rounds; finished rounds in `directory` are not repeated."""
    name = "plain" if example_privacy is None else "private"
    cohort: dict[str, Any] = {
        "recipe": RECIPE,
        "optimizer": {"name": "sgd", "lr": SERVER_LR},
        "training": {"steps": STEPS, "lr": LR, "evaluation_interval": 1000, "validation_limit": HELD_OUT},
    }
    if example_privacy is not None:
        cohort["recipe"] = RECIPE | {"privacy": "clipped"}
        cohort["privacy"] = {"examples": example_privacy.model_dump()}
    sources = {"sources": [str(path) for path in files["cohort"]], "partition": "source"}
    data = sources | {"per_device": PER_DEVICE, "held_out": HELD_OUT, "test": ROUND_TEST_SENTENCES}
    settings = {"devices": DEVICES, "rounds": 2 if quick else ROUNDS, "measured": 1, "base": str(model_file())}
    program = directory / ("program" if example_privacy is None else "program-private")

    def on_progress(activity: str, done: int, total: int) -> None:
        notes.print(f"  {name} {activity} {done}/{total}")

    return simulate(
        read_settings(None, settings | {"data": data, "cohort": cohort}),
        directory / name,
        Resources(engine="inline", program=program),
        on_progress,
    )


def _write_data(directory: Path) -> Files:
    """Writes the disjoint sentences of the cohort and of the users, and the test sentences beside both."""
    files: Files = {"cohort": [], "personal": []}
    for name, source in SOURCES.items():
        lines = (source / "train.jsonl").read_text().splitlines(keepends=True)
        test = (source / "test.jsonl").read_text().splitlines(keepends=True)
        shuffled = [lines[index] for index in np.random.default_rng(5).permutation(len(lines))]
        test_lines = [test[index] for index in np.random.default_rng(6).permutation(len(test))[:TEST_SENTENCES]]
        users = USERS * PER_USER
        for group, train in (("cohort", shuffled[users:]), ("personal", shuffled[:users] + test_lines)):
            home = directory / group / name
            home.mkdir(parents=True, exist_ok=True)
            (home / "train.jsonl").write_text("".join(train))
            (home / "test.jsonl").write_text("".join(test_lines))
            files[group].append(home)
    return files


def _curve(personal: Worker, source: int, user: int, start: F32, quick: bool) -> dict[int, int]:
    """Returns how many of TEST_SENTENCES test sentences of the user's source are right, by trained steps."""
    first = source * (USERS * PER_USER + TEST_SENTENCES)
    test_indices = range(first + USERS * PER_USER, first + USERS * PER_USER + TEST_SENTENCES)
    own_indices = range(first + user * PER_USER, first + (user + 1) * PER_USER)
    training = PERSONAL.model_copy(update={"steps": 20}) if quick else PERSONAL
    local_task = LocalTask(
        device=100 * source + user,
        shard=Shard(tuple(own_indices), tuple(test_indices)),
        start=start,
        start_sha256=sha256_hex(start.tobytes()) if start.any() else None,
        training=training,
        seed=0,
        **dict.fromkeys(("round", "privacy", "faults")),
    )
    result = personal.train(local_task).result
    return {
        evaluation.step: evaluation.correct for evaluation in result.evaluations if evaluation.split == "validation"
    }
