"""`bench agent`: the kill table (every engine and estimator, killed as a trainer alone and as a whole agent), the loop
around the program, and the idle agent.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.agent import overhead
from bench.agent.kills import TWICE, Daemon, Finals, Kind, Trainer, Victim, measure
from bench.result import Measured, Row, notes
from bench.runner import JsonFile, Only, Quick, native_runner, run_parts
from bench.tiny import compile_tiny, plan_of, write_base, write_sentences
from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.runner.location import RUNNER_VARIABLE
from shared.training_settings import TrainingSettings

TRAINING = TrainingSettings(steps=400, evaluation_interval=50, seed=7)
QUICK_FEWER = 10
# Engine, estimator, what is killed, trials: 200, of which 60 are with exact gradients.
TABLE = (
    ("native", "replay", "trainer", 96),
    ("python", "replay", "trainer", 10),
    ("native", "replay", "daemon", 28),
    ("python", "replay", "daemon", 6),
    ("native", "gradient", "trainer", 32),
    ("python", "gradient", "trainer", 13),
    ("native", "gradient", "daemon", 10),
    ("python", "gradient", "daemon", 5),
)


def measure_kills(root: Path, kept: Path, data: Path, runner: Path, quick: bool) -> Measured:
    """Returns the kill table, and its sums as claims. kept: directory of compiled programs."""
    base = write_base(root / "base")
    exact: dict[str, Any] = {"estimator": "gradient", "queries": 1, "layers": "last:1", "loss": "candidates"}
    settings: dict[str, dict[str, Any]] = {"replay": {}, "gradient": exact}
    programs = {name: compile_tiny(base, kept / name, **each) for name, each in settings.items()}

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
    for each in kinds:
        notes.print(f"kills: {each.name}")
        few = replace(each, trials=max(each.trials // QUICK_FEWER, 1)) if quick else each
        row, found = measure(few, root / "kills" / each.name, expected.get(each.estimator))
        expected.setdefault(each.estimator, found)
        rows.append(row)
    claims = {f"kill_{name}": sum(row[name] for row in rows) for name in ("trials", "kills", "mismatches", TWICE)}
    gradient = [row for row in rows if row["estimator"] == "gradient"]
    return rows, claims | {"kill_trials_gradient": sum(row["trials"] for row in gradient)}


def agent(
    json_file: JsonFile = None,
    quick: Quick = False,
    only: Only = None,
    programs: Annotated[Path | None, typer.Option(help="Keep compiled programs in this directory.")] = None,
) -> None:
    """Kill the agent at random points, measure it while idle, and time the loop around the program."""
    runner = native_runner()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        sentences, kept = write_sentences(root / "sentences"), programs or root / "programs"

        parts = {
            "idle": lambda quick: overhead.idle(root / "idle", sentences, quick),
            "loop": lambda quick: overhead.loop(root, kept, runner, quick),
            "kills": lambda quick: measure_kills(root, kept, sentences, runner, quick),
        }
        run_parts(parts, json_file, quick, only)
