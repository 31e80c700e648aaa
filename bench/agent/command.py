"""`bench agent`: the kill table, the loop around the program, and the idle agent."""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

from bench.agent import kill_table, overhead
from bench.result import Measured, notes
from bench.runner import JsonFile, Only, Quick, run_parts
from bench.tiny import compile_tiny, write_base, write_sentences
from device_agent.runner.build import build_runner
from device_agent.runner.location import RunnerLocation


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

        def measure_kills(quick: bool) -> Measured:
            base = write_base(root / "base")
            exact: dict[str, Any] = {"estimator": "gradient", "queries": 1, "layers": "last:1", "loss": "candidates"}
            programs = {
                "replay": overhead.once(kept / "replay", partial(compile_tiny, base)),
                "gradient": overhead.once(kept / "gradient", partial(compile_tiny, base, **exact)),
            }
            return kill_table.measure_all(root / "kills", programs, sentences, runner, quick)

        parts = {
            "idle": lambda quick: overhead.idle(root / "idle", sentences, quick),
            "loop": lambda quick: overhead.loop(root, kept, runner, quick),
            "kills": measure_kills,
        }
        run_parts(parts, json_file, quick, only)
