"""Measures one base in one precision and estimator: a short run in the native runner, and memory of processes."""

import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.agent.overhead import resource_usage
from bench.programs import CompiledProgram
from bench.result import Row, notes
from bench.runner import peak_memory
from bench.scale.bases import Size
from bench.step.floor import gemm_seconds
from bench.tiny import plan_of
from device_agent.executors.runner import RunnerLauncher
from device_agent.memory import spare_bytes
from device_agent.training.run_directory import ResourceUsage
from server.compiler.checkpoints.base import locate_base
from server.jobs.memory import predicted_peak
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.training_settings import TrainingSettings

POLL_SECONDS = 0.02
STEPS = 3
RECORDS = 12  # E x STEPS at most: no step reuses the states of a sentence
MARGIN = 1.25  # of free memory over the predicted peak of a run
FLOOR_ROUNDS = 3
LAST_LAYERS = 8
COMMON: dict[str, Any] = {"sequence_length": 64, "answer_length": 6, "choices": 2}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "replay": {"targets": ("v_proj", "o_proj"), "rank": 8, "queries": 2, "effective_batch": 2},
    "gradient": {"targets": TARGETS, "rank": 8, "layers": f"last:{LAST_LAYERS}", "effective_batch": 4},
    "directional": {"targets": ("v_proj", "o_proj"), "rank": 1, "layers": f"last:{LAST_LAYERS}", "effective_batch": 4},
    # One text of 128 tokens, every token of which counts, and all layers: QVAC Fabric's published protocol.
    "text": {
        "estimator": "gradient",
        "targets": TARGETS,
        "rank": 8,
        "effective_batch": 1,
        "sequence_length": 128,
        "answer_length": 127,
    },
}


def recipe_of(base: Path, precision: str, estimator: str, size: Size) -> Recipe:
    """Returns the recipe to measure. A base of fewer layers than it adapts has all adapted."""
    settings = COMMON | {"estimator": estimator} | ESTIMATORS[estimator]
    if size.config["num_hidden_layers"] < LAST_LAYERS:
        settings["layers"] = "all"
    settings["targets"] = tuple(each for each in settings["targets"] if size.model != "opt" or each != "gate_proj")
    reference = BaseRef(name="random", sha256=locate_base(str(base)).sha256)
    return Recipe.model_validate({"base": reference, "precision": precision} | settings)


def device_run(launcher: RunnerLauncher, program: CompiledProgram, parameters: int) -> Row:
    """Trains STEPS steps; returns the columns of the device, or none if the run might not fit into memory."""
    predicted = predicted_peak(program.recipe, program.manifest.shape, parameters)
    if (spare := spare_bytes()) < MARGIN * predicted:
        notes.print(f"not trained: it may need {predicted / 1e9:.1f} GB, and {spare / 1e9:.1f} GB are free")
        return {}
    data = program.directory / "data"
    data.mkdir()
    for split, count in (("train", RECORDS), ("validation", 2)):
        lines = [{"text": f"a long sentence about film number {n} " * 10, "label": "1"} for n in range(count)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(f"{program.path('weights')}.packed").unlink(missing_ok=True)
    first, second = (_train(launcher, program, data, steps) for steps in (STEPS, 1))
    row: Row = {
        "load_seconds": first.load_seconds,
        "second_load_seconds": second.load_seconds,
        "peak_rss_bytes": first.peak_rss_bytes,
        "step_seconds": first.train_seconds / STEPS,
    }
    recipe, shape = program.recipe, program.manifest.shape
    if recipe.estimator == "replay" and recipe.precision == "fp32":
        row["floor_seconds"] = statistics.median(gemm_seconds(recipe, shape, FLOOR_ROUNDS)) * shape.layers
    return row


def _train(launcher: RunnerLauncher, program: CompiledProgram, data: Path, steps: int) -> ResourceUsage:
    """Trains in a new run directory; returns the times and the memory."""
    training = TrainingSettings(steps=steps, lr=1e-3, evaluation_interval=steps)
    return resource_usage(launcher, plan_of(program, data, training), program.directory / f"run-{steps}")


@contextmanager
def watch_children() -> Iterator[list[int]]:
    """Yields a list whose one element is the most memory of this process's children that a thread has seen, bytes.

    It is the highest sum of their resident memory, or the peak of one of them if that is higher.
    """
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            total_bytes = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):
                    total_bytes += process.memory_info().rss
                    most[0] = max(most[0], peak_memory(process.pid))
            most[0] = max(most[0], total_bytes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
