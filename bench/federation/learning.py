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
from bench.result import Measured, Row, notes
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
Files = dict[
    str, list[Path]
]  # of `cohort` and `personal`: a directory for each source, as `simulation.pool` reads them
CORES = os.cpu_count() or 1
SOURCES = {"movies": MOVIES, "products": PRODUCTS}
DEVICES, PER_DEVICE, HELD_OUT = 16, 84, 4
USERS, PER_USER, TESTED = 2, 36, 120  # of each source
LOOKED_AT = 40  # test sentences after each round; all of them at the end
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


def warm_start(quick: bool, place: Path) -> Measured:
    """Returns rows of the cohort's rounds and of every user's curves, and the ratio. place: for programs and rounds."""
    files = _split(place / "data")
    found = _cohort(place, files, quick, None)
    task = named_task("sst2").model_dump_json()
    personal = Worker(WorkerConfig(place / "program", tuple(files["personal"]), task, 1, CORES, place / "log"))
    start = Store(place / "plain").adapter(len(found.rounds) - 1, found.manifest.size)
    rows, sums = _rounds("plain", found), {"cohort": Counter[int](), "zero": Counter[int]()}
    for name, begin in (("cohort", start), ("zero", np.zeros_like(start))):
        for number, source in enumerate(SOURCES):
            for user in range(USERS):
                curve = _curve(personal, number, user, begin, quick)
                notes.print(f"  user {user} of {source}: {curve} of {TESTED}")
                rows.append({"what": "personal", "from": name, "source": source, "user": user, "right": curve})
                sums[name].update(curve)
    cohort, zero = (dict(sorted(sums[name].items())) for name in ("cohort", "zero"))
    last, target, of = max(zero), max(zero.values()), TESTED * USERS * len(SOURCES)
    reached = [step for step, right in cohort.items() if right >= target]
    rows.append({"what": "sums", "of": of, "cohort": cohort, "zero": zero})
    return rows, {
        "warm_start_step_ratio": min(reached) / last if reached else math.inf,
        "warm_start_accuracy": cohort[0] / of,
        "from_zero_accuracy": zero[last] / of,
        "from_zero_best_accuracy": target / of,
        "untrained_accuracy": zero[0] / of,
    }


def privacy(quick: bool, place: Path) -> Measured:
    """Returns rows of both cohorts' rounds, and the points between their adapters. place: for programs and rounds."""
    steps = (2 if quick else ROUNDS) * STEPS
    rate = EFFECTIVE_BATCH / PER_DEVICE
    noise = noise_for(EPSILON, DELTA, rate, steps)
    promised = ExamplePrivacy(clip=CLIP, noise_multiplier=noise, delta=DELTA, sampling_rate=rate)
    files = _split(place / "data")
    found = {name: _cohort(place, files, quick, promise) for name, promise in (("plain", None), ("private", promised))}
    accuracy = {name: _tested(place, files, name, one) for name, one in found.items()}
    rows = [row for name, one in found.items() for row in _rounds(name, one)]
    rows.append({"what": "noise", "sigma": noise, "clip": CLIP, "sampling_rate": rate, "steps": steps})
    return rows, {
        "dp_cost_points": 100 * (accuracy["plain"] - accuracy["private"]),
        "dp_epsilon": epsilon_of([run_spending(promised, steps)], DELTA),
        "dp_accuracy": accuracy["private"],
        "no_dp_accuracy": accuracy["plain"],
    }


def _tested(place: Path, files: Files, name: str, found: SimulationOutcome) -> float:
    """Returns the accuracy of a cohort's adapter on all test sentences, with the program without privacy."""
    task = named_task("sst2").model_dump_json()
    whole = WorkerConfig(place / "program", tuple(files["cohort"]), task, TESTED * len(SOURCES), CORES, place / "log")
    flat = Store(place / name).adapter(len(found.rounds) - 1, found.manifest.size)
    accuracy = worker(whole).test(flat).accuracy
    notes.print(f"  {name}: {accuracy:.1%} of {TESTED * len(SOURCES)} test sentences")
    return accuracy


def _cohort(place: Path, files: Files, quick: bool, promised: ExamplePrivacy | None) -> SimulationOutcome:
    """Runs the cohort's rounds; finished rounds in `place` are not repeated."""
    name = "plain" if promised is None else "private"
    cohort: dict[str, Any] = {
        "recipe": RECIPE,
        "optimizer": {"name": "sgd", "lr": SERVER_LR},
        "training": {"steps": STEPS, "lr": LR, "evaluation_interval": 1000, "validation_limit": HELD_OUT},
    }
    if promised is not None:
        cohort["recipe"] = RECIPE | {"privacy": "clipped"}
        cohort["privacy"] = {"examples": promised.model_dump()}
    sources = {"sources": [str(each) for each in files["cohort"]], "partition": "source"}
    data = sources | {"per_device": PER_DEVICE, "held_out": HELD_OUT, "test": LOOKED_AT}
    given = {"devices": DEVICES, "rounds": 2 if quick else ROUNDS, "measured": 1, "base": str(model_file())}
    program = place / ("program" if promised is None else "program-private")

    def tell(what: str, done: int, of: int) -> None:
        notes.print(f"  {name} {what} {done}/{of}")

    return simulate(
        read_settings(None, given | {"data": data, "cohort": cohort}),
        place / name,
        Resources(engine="inline", program=program),
        tell,
    )


def _split(place: Path) -> Files:
    """Writes the disjoint sentences of the cohort and of the users, and the test sentences beside both."""
    found: Files = {"cohort": [], "personal": []}
    for name, source in SOURCES.items():
        lines = (source / "train.jsonl").read_text().splitlines(keepends=True)
        test = (source / "test.jsonl").read_text().splitlines(keepends=True)
        own = [lines[index] for index in np.random.default_rng(5).permutation(len(lines))]
        tested = [test[index] for index in np.random.default_rng(6).permutation(len(test))[:TESTED]]
        users = USERS * PER_USER
        for which, train in (("cohort", own[users:]), ("personal", own[:users] + tested)):
            home = place / which / name
            home.mkdir(parents=True, exist_ok=True)
            (home / "train.jsonl").write_text("".join(train))
            (home / "test.jsonl").write_text("".join(tested))
            found[which].append(home)
    return found


def _curve(personal: Worker, source: int, user: int, start: F32, quick: bool) -> dict[int, int]:
    """Returns how many of TESTED test sentences of the user's source are right, by trained steps."""
    first = source * (USERS * PER_USER + TESTED)
    tested = range(first + USERS * PER_USER, first + USERS * PER_USER + TESTED)
    mine = range(first + user * PER_USER, first + (user + 1) * PER_USER)
    training = PERSONAL.model_copy(update={"steps": 20}) if quick else PERSONAL
    local_task = LocalTask(
        device=100 * source + user,
        shard=Shard(tuple(mine), tuple(tested)),
        start=start,
        start_sha256=sha256_hex(start.tobytes()) if start.any() else None,
        training=training,
        seed=0,
        **dict.fromkeys(("round", "privacy", "faults")),
    )
    result = personal.train(local_task).result
    return {each.step: each.correct for each in result.evaluations if each.split == "validation"}


def _rounds(name: str, found: SimulationOutcome) -> list[Row]:
    columns = {"number", "accuracy", "loss", "seconds"}
    return [{"what": "round", "cohort": name, **one.model_dump(mode="json", include=columns)} for one in found.rounds]
