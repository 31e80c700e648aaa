"""Peak memory of our programs against first-order LoRA-FA in PyTorch, each in a process of its own.

Ours is the product: the server's program in the agent's runtime, training and evaluating in turn; its peak is that of
the whole process. First order is its step alone, with and without checkpointing, and its peak counts from when the
model has been loaded. Model, targets, layers, number of sequences and length are the same.
"""

import ctypes
import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.baselines.adapted import load_model
from bench.baselines.steps import FirstOrder
from bench.programs import LR, CompiledProgram, compile_cold, model_file, random_batch, reopen, smollm2_recipe
from bench.result import Claims, notes
from bench.runner import load_or_compute, run_module
from device_agent.executors.program import Rates
from device_agent.memory import peak_rss_bytes
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import DEFAULT_EPS, Recipe
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_score, pack_step

LENGTH, BATCH, QUERIES = 256, 16, 4
MICRO_BATCH = 4  # examples of the exact gradient in one forward and reverse pass
STEPS = 2


def peak_memory(directory: Path) -> Claims:
    """Returns the ratios as claims; those of `replay` are of fp32 unless they say int8, those of gradient of int8.

    directory: of programs and finished measurements. E = batch / q; of estimator gradient, the batch.
    """
    common: dict[str, Any] = {"sequence_length": LENGTH}
    replay = common | {"queries": QUERIES, "effective_batch": BATCH // QUERIES}
    gradient = common | {"estimator": "gradient", "queries": 1, "effective_batch": BATCH, "micro_batch": MICRO_BATCH}
    first_order = smollm2_recipe(**common, queries=1, effective_batch=BATCH)
    plain, checkpointed = (
        _peak_bytes(directory / name, [first_order.model_dump(mode="json"), checkpointing])
        for name, checkpointing in (("first-order", False), ("first-order-checkpointing", True))
    )
    fp32, int8, exact = (
        _peak_bytes(program.directory / "peak", [str(program.directory)])
        for program in (
            compile_cold(smollm2_recipe(**replay), directory / "replay"),
            compile_cold(smollm2_recipe(**replay, precision="int8"), directory / "replay-int8"),
            compile_cold(smollm2_recipe(**gradient, precision="int8"), directory / "gradient-int8"),
        )
    )
    return {
        "peak_memory_vs_first_order": fp32 / plain,
        "peak_memory_vs_first_order_int8": int8 / plain,
        "gradient_peak_memory_vs_first_order": exact / plain,
        "gradient_peak_memory_vs_checkpointed": exact / checkpointed,
    }


def _peak_bytes(path: Path, argument: list[Any]) -> int:
    """Returns the peak resident bytes of this module in a process of its own; they are kept in `path`.json."""
    notes.print(f"peak memory: {path}")
    return int(load_or_compute(Path(f"{path}.json"), partial(run_module, "bench.step.memory", argument)))


def train_and_score(program: CompiledProgram) -> None:
    """Runs steps and scores in this process."""
    recipe = program.recipe
    examples = program.examples("train")[: recipe.score_rows]
    runtime = program.open()
    for number in range(STEPS):
        batch = pack_step(examples[: recipe.effective_batch], recipe)
        if recipe.estimator == "gradient":
            runtime.gradient_step(batch, Rates(LR))
        else:
            runtime.step(batch, query_seeds(0, number, recipe.queries), LR, DEFAULT_EPS[recipe.precision])
        runtime.score(next(iter(pack_score(examples, recipe))).inputs)
    runtime.close()


def train_first_order(recipe: Recipe, *, checkpointing: bool) -> None:
    """Runs steps of first order on random tokens in this process, whose peak memory counts from the loaded model on."""
    shape = inspect_base(str(model_file()))
    learner = FirstOrder(load_model(), recipe, shape, checkpointing=checkpointing)
    _reset_peak()
    for number in range(STEPS):
        learner.step(random_batch(recipe, shape.vocabulary, recipe.sequence_length, number), LR)


def _reset_peak() -> None:
    """Returns freed memory to the system and resets the peak where Linux allows it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if (refs := Path("/proc/self/clear_refs")).exists():
        refs.write_text("5")


if __name__ == "__main__":
    program_or_recipe, *checkpointing = json.loads(sys.argv[1])
    if checkpointing:
        train_first_order(Recipe(**program_or_recipe), checkpointing=checkpointing[0])
    else:
        train_and_score(reopen(Path(program_or_recipe)))
    print(peak_rss_bytes())
