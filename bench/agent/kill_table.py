"""`bench agent`, the kill table: every engine and estimator, killed as a trainer alone and as a whole agent."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.agent import phone_kills
from bench.agent.kills import TWICE, Daemon, Finals, Kind, Trainer, Victim, measure
from bench.programs import Compiled
from bench.result import Measured, Row, notes
from bench.tiny import plan_of
from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.engines.choice import RUNNER_VARIABLE
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


def measure_all(root: Path, programs: Mapping[str, Compiled], data: Path, runner: Path, quick: bool) -> Measured:
    """Returns the kill table, and its sums as claims. programs: by estimator."""

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
            row, found = measure(few, root / each.name, expected.get(each.estimator) if each.same else None)
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
