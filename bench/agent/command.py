"""`bench agent`: the kill table (every engine and estimator, killed as a trainer alone and as a whole agent), the loop
around the program, and the idle agent.
"""

import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

from bench.agent import overhead, phone_kills
from bench.agent.kills import TWICE, Daemon, Finals, Kind, Trainer, Victim, measure
from bench.programs import Compiled
from bench.result import Measured, Row, notes
from bench.runner import JsonFile, Only, Quick, run_parts
from bench.tiny import compile_tiny, plan_of, write_base, write_sentences
from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.engines.choice import RUNNER_VARIABLE
from device_agent.runner.build import build_runner
from device_agent.runner.location import RunnerLocation
from shared.job import TrainingSettings

TRAINING = TrainingSettings(steps=400, evaluation_interval=50, seed=7)
QUICK_FEWER = 10
# Engine, estimator, what is killed, trials. With a phone's 16, 200 trials; 60 of them with exact gradients.
TABLE = (
    ("native", "replay", "trainer", 84),
    ("python", "replay", "trainer", 10),
    ("native", "replay", "daemon", 24),
    ("python", "replay", "daemon", 6),
    ("python", "gradient", "trainer", 45),
    ("python", "gradient", "daemon", 15),
)


def measure_kills(root: Path, kept: Path, data: Path, runner: Path, quick: bool) -> Measured:
    """Returns the kill table, and its sums as claims. kept: directory of compiled programs."""
    base = write_base(root / "base")
    exact: dict[str, Any] = {"estimator": "gradient", "queries": 1, "layers": "last:1", "loss": "candidates"}
    settings: dict[str, dict[str, Any]] = {"replay": {}, "gradient": exact}
    programs = {
        name: overhead.once(kept / name, partial(compile_tiny, base, **each)) for name, each in settings.items()
    }

    def kind(engine: str, estimator: str, killed: str, trials: int) -> Kind:
        program, env = programs[estimator], {RUNNER_VARIABLE: str(runner)}

        def make(directory: Path) -> Victim:
            if killed == "daemon":
                return Daemon(directory, program, data, TRAINING, "--engine", engine, **env)
            chosen = NativeEngine(runner) if engine == "native" else PythonEngine()
            return Trainer(directory, plan_of(program, data, TRAINING), chosen)

        return Kind(engine, estimator, killed, trials, make)

    kinds = [kind(*line) for line in TABLE]
    rows: list[Row] = []
    expected: dict[str, Finals] = {}
    with phone_kills.phone() as phone:
        if isinstance(phone, str):
            notes.print(f"no phone: {phone}")
            about = {"what": "kills", "engine": "adb", "trials": 0, "skipped": phone}
            rows += [about | {"killed": killed} for killed in ("trainer", "daemon")]
        else:
            kinds += _phone_kinds(phone, programs["replay"], data, runner)
        for each in kinds:
            notes.print(f"kills: {each.name}")
            few = replace(each, trials=max(each.trials // QUICK_FEWER, 1)) if quick else each
            row, found = measure(few, root / "kills" / each.name, expected.get(each.estimator) if each.same else None)
            expected.setdefault(each.estimator, found)
            rows.append(row)
    claims = {
        f"kill_{name}": sum(row.get(name, 0) for row in rows) for name in ("trials", "kills", "mismatches", TWICE)
    }
    gradient = [row for row in rows if row.get("estimator") == "gradient"]
    return rows, claims | {"kill_trials_gradient": sum(row["trials"] for row in gradient)}


def _phone_kinds(phone: Any, program: Compiled, data: Path, runner: Path) -> list[Kind]:
    """Returns the rows of a phone, which run one at a time."""
    few = TRAINING.model_copy(update={"steps": 60, "evaluation_interval": 20})
    env = {RUNNER_VARIABLE: str(runner), "PATH": os.pathsep.join((str(phone.adb.parent), os.environ["PATH"]))}
    options = ("--engine", "adb", "--adb", phone.serial)

    def daemon(directory: Path) -> Victim:
        phone_kills.forget(phone)
        return Daemon(directory, program, data, TRAINING, *options, **env)

    def trainer(directory: Path) -> Victim:
        return phone_kills.PhoneRunner(directory, plan_of(program, data, few), runner, phone)

    return [
        Kind("adb", "replay", "trainer", 8, trainer, alone=True, same=False),
        Kind("adb", "replay", "daemon", 8, daemon, alone=True),
    ]


def agent(
    json_file: JsonFile = None,
    quick: Quick = False,
    only: Only = None,
    programs: Annotated[Path | None, typer.Option(help="Keep compiled programs in this directory.")] = None,
) -> None:
    """Kill the agent at random points, measure it while idle, and time the loop around the program."""
    # CMake and Ninja of this Python's environment come before the machine's, which may be too old.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    place = RunnerLocation(Path(platformdirs.user_cache_dir("mobizo-bench")))
    runner = place.find() or build_runner(place, notes.print)  # built once per machine
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        sentences, kept = write_sentences(root / "sentences"), programs or root / "programs"

        parts = {
            "idle": lambda quick: overhead.idle(root / "idle", sentences, quick),
            "loop": lambda quick: overhead.loop(root, kept, runner, quick),
            "kills": lambda quick: measure_kills(root, kept, sentences, runner, quick),
        }
        run_parts(parts, json_file, quick, only)
