"""`bench agent`: the kill table (each executor and estimator; kills of the loop, of the executor, and of both), the
training loop around the program, and the idle agent.
"""

import tempfile
from functools import partial
from pathlib import Path

from bench.agent import overhead
from bench.agent.kills import RECOMPUTED_STEPS, Agent, CreateRun, FileHashes, Loop, measure
from bench.result import Measurement, Row, notes
from bench.runner import JsonFile, Keep, Only, Quick, run_parts
from bench.tiny import compile_tiny, plan_of, write_sentences
from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import find_runner
from device_agent.training.run_plan import own_texts
from shared.training_settings import TrainingSettings
from tests.device_agent.tiny import write_base

TRAINING = {
    "replay": TrainingSettings(steps=200, evaluation_interval=25, seed=7),
    "gradient": TrainingSettings(steps=60, evaluation_interval=10, seed=7),  # each takes as long as five of replay
}
QUICK_FEWER, CLAIMED = 10, ("trials", "mismatches", RECOMPUTED_STEPS)
# Executor, estimator, target of the kills, trials: 200 in all, of which 60 are with exact gradients.
TABLE = (
    ("native", "replay", "executor", 50),
    ("python", "replay", "executor", 10),
    ("native", "replay", "loop", 40),
    ("native", "replay", "both", 34),
    ("python", "replay", "both", 6),
    ("native", "gradient", "executor", 22),
    ("python", "gradient", "executor", 8),
    ("native", "gradient", "loop", 15),
    ("native", "gradient", "both", 10),
    ("python", "gradient", "both", 5),
)


def measure_kills(root: Path, programs_directory: Path, data: Path, runner: Path, quick: bool) -> Measurement:
    """Returns the kill table, and its sums as claims. programs_directory: for compiled programs."""
    base = root / "base"
    write_base(base)
    gradient = {"estimator": "gradient", "queries": 1, "layers": "last:1", "loss": "candidates"}
    programs = {
        "replay": compile_tiny(base, programs_directory / "replay"),
        "gradient": compile_tiny(base, programs_directory / "gradient", **gradient),
    }

    rows: list[Row] = []
    expected: dict[str, FileHashes] = {}
    for executor, estimator, target, trials in TABLE:
        name, program, training = f"{executor}-{estimator}-{target}", programs[estimator], TRAINING[estimator]
        notes.print(f"kills: {name}")
        create_run: CreateRun
        if target == "executor":
            launcher = RunnerLauncher(runner) if executor == "native" else PythonLauncher()
            # The agent measures reference texts, too.
            plan = plan_of(program, data, training).model_copy(update={"reference_texts": own_texts()})
            create_run = partial(Loop, plan, launcher)
        else:
            create_run = partial(Agent, program, data, training, executor, target == "both")
        count = max(trials // QUICK_FEWER, 1) if quick else trials
        row, hashes = measure(name, create_run, count, root / "kills" / name, expected.get(estimator))
        expected.setdefault(estimator, hashes)
        rows.append(row)
    return rows, {f"kill_{name}": sum(row[name] for row in rows) for name in CLAIMED}


def agent(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Kill the agent at random points, measure it while idle, and time the loop around the program."""
    runner = find_runner()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        sentences, programs_directory = write_sentences(root / "sentences"), keep or root / "programs"

        parts = {
            "idle": lambda quick: overhead.idle(root / "idle", sentences, quick),
            "loop": lambda quick: overhead.loop(root, programs_directory, runner, quick),
            "kills": lambda quick: measure_kills(root, programs_directory, sentences, runner, quick),
        }
        run_parts(parts, json_file, quick, only)
