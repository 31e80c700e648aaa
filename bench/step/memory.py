"""Peak memory of our programs against first-order LoRA-FA in PyTorch, each in a process of its own.

Ours is the product: the server's program in the agent's runtime, training and evaluating in turn; its peak is that of
the whole process. First order is its step alone, with and without checkpointing, and its peak counts from when the
model has been loaded. Model, targets, layers, number of sequences and length are the same.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

from bench.baselines.pytorch_model import load_model
from bench.baselines.steps import FirstOrder
from bench.programs import LR, CompiledProgram, compile_cold, model_file, random_batch, reopen, smollm2_recipe
from bench.result import Measurement, Row, commit, notes
from bench.runner import load_or_compute, run_module
from device_agent.executors.program import Rates
from device_agent.memory import peak_rss_bytes
from server.compiler import inspect_base
from server.compiler.checkpoints.base import locate_base
from shared.recipe import DEFAULT_EPS, BaseRef, Precision, Recipe
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_score, pack_step

LENGTH, BATCH, QUERIES = 256, 16, 4
MICRO_BATCH = 4  # examples of the exact gradient in one forward and reverse pass
STEPS = 2
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def peak_memory(directory: Path, base: Path | None = None, length: int = LENGTH, batch: int = BATCH) -> Measurement:
    """Returns rows of first order and ours, and the ratios; claims of `replay` are of fp32 unless they say int8.

    directory: of programs and finished rows. base: a model's directory, SmolLM2-135M if None. E = batch / q; of
    estimator gradient, the batch. The claims of gradient are of the last precision, int8.
    """
    source = str(base or model_file())
    reference = BaseRef(name=Path(source).stem, sha256=locate_base(source).sha256)
    common: dict[str, Any] = {"base": reference, "sequence_length": length}
    replay = common | {"queries": QUERIES, "effective_batch": batch // QUERIES}
    gradient = common | {"estimator": "gradient", "queries": 1, "effective_batch": batch}
    first_order = [
        _first_order_row(directory, source, smollm2_recipe(**common, queries=1, effective_batch=batch), checkpointing)
        for checkpointing in (False, True)
    ]
    if batch > MICRO_BATCH:
        gradient["micro_batch"] = MICRO_BATCH
    ours = {
        name: [
            _program_row(directory, source, smollm2_recipe(**settings, precision=precision)) for precision in PRECISIONS
        ]
        for name, settings in (("replay", replay), ("gradient", gradient))
    }
    rows = [*first_order, *ours["replay"], *ours["gradient"]]
    for row in rows:
        row |= {"comparison": "peak memory", "over_first_order": row["peak_rss_bytes"] / rows[0]["peak_rss_bytes"]}
    gradient_peak = ours["gradient"][-1]["peak_rss_bytes"]
    return rows, {
        "peak_memory_vs_first_order": ours["replay"][0]["over_first_order"],
        "peak_memory_vs_first_order_int8": ours["replay"][-1]["over_first_order"],
        "gradient_peak_memory_vs_first_order": gradient_peak / first_order[0]["peak_rss_bytes"],
        "gradient_peak_memory_vs_checkpointed": gradient_peak / first_order[1]["peak_rss_bytes"],
    }


def _first_order_row(directory: Path, source: str, recipe: Recipe, checkpointing: bool) -> Row:
    name = "first order, checkpointing" if checkpointing else "first order"

    def compute() -> Row:
        notes.print(f"peak memory: {name}")
        peak = int(run_module("bench.step.memory", [source, recipe.model_dump(mode="json"), checkpointing]))
        return {"commit": commit(), "who": name, "sequence_length": recipe.sequence_length, "peak_rss_bytes": peak}

    path = directory / f"first-order-{recipe.id[:24]}{'-checkpointing' if checkpointing else ''}.json"
    return dict(load_or_compute(path, compute))


def _program_row(directory: Path, source: str, recipe: Recipe) -> Row:
    program_directory = directory / recipe.id[:24]
    columns = {"precision", "queries", "effective_batch", "micro_batch", "sequence_length"}
    label = {"commit": commit(), "who": f"{recipe.estimator}, training and evaluating"}

    def compute() -> Row:
        notes.print(f"peak memory: {recipe.estimator}, {recipe.precision}")
        program = compile_cold(recipe, program_directory, Path(source))
        row = label | recipe.model_dump(mode="json", include=columns) | {"peak_rss_bytes": peak_rss(program_directory)}
        return row | {"weights_bytes": program.size("weights"), "planned_bytes": program.manifest.planned_bytes}

    return dict(load_or_compute(program_directory / "row.json", compute))


def peak_rss(directory: Path) -> int:
    """Returns the peak resident bytes of a fresh process that alternates steps and scores on a program."""
    return int(run_module("bench.step.memory", [str(directory)]))


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


def train_first_order(source: str, recipe: Recipe, *, checkpointing: bool) -> None:
    """Runs steps of first order on random tokens in this process, whose peak memory counts from the loaded model on."""
    shape = inspect_base(source)
    learner = FirstOrder(load_model(source), recipe, shape, checkpointing=checkpointing)
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
    path, *first_order = json.loads(sys.argv[1])
    if first_order:
        recipe_fields, checkpointing = first_order
        train_first_order(path, Recipe(**recipe_fields), checkpointing=checkpointing)
    else:
        train_and_score(reopen(Path(path)))
    print(peak_rss_bytes())
