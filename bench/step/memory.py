"""Peak memory of our programs against first-order LoRA-FA in PyTorch, each in a process of its own.

Ours is the product: the server's program in the agent's runtime, training and evaluating in turn; its peak is that of
the whole process. First order is its step alone, with and without checkpointing, and its peak counts from when the
model has been loaded. Model, targets, layers, number of sequences and length are the same.
"""

import json
import sys
from pathlib import Path

from bench.programs import CompiledProgram, compile_cold, reopen
from bench.result import Claims, Row, commit, notes
from bench.runner import load_or_compute, run_module
from bench.step.grid import Workspace, measure, open_workspace
from bench.step.process import Cell, Contender
from device_agent.memory import peak_rss_bytes
from device_agent.runtimes import Rates
from shared.recipe import DEFAULT_EPS, Precision, Recipe
from shared.zo.encoding import pack_score, pack_step
from shared.zo.noise import query_seeds

LENGTH, BATCH, QUERIES = 256, 16, 4
MICRO_BATCH = 4  # examples of the exact gradient in one forward and reverse pass
FIRST_ORDER_SECONDS = 600.0  # half of its time limit
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def peak_memory(
    keep: Path | None = None, base: Path | None = None, length: int = LENGTH, batch: int = BATCH, queries: int = QUERIES
) -> tuple[list[Row], Claims]:
    """Returns rows of first order and ours, and the ratios; claims of `replay` are of fp32 unless they say int8.

    base: a model's directory, SmolLM2-135M if None. E = batch / q; of estimator gradient, the batch. The claims of
    gradient are of the last precision, int8.
    """
    with open_workspace(keep, base) as workspace:
        first_order_rows = []
        for contender in (Contender.FO_LORA_FA, Contender.FO_CHECKPOINTING):
            cell = Cell(contender=contender, engine="eager", length=length, batch=batch)
            notes.print(f"peak memory: {cell.label}")
            first_order_rows.append(measure(cell, workspace, rounds=1, seconds=FIRST_ORDER_SECONDS))
            if "peak_rss_bytes" not in first_order_rows[-1]:
                raise SystemExit(f"{cell.label} was not measured: {first_order_rows[-1]}")
        mobizo_cell = Cell(contender=Contender.MOBIZO, engine="executorch", length=length, batch=batch, queries=queries)
        replay = mobizo_cell.recipe(workspace.base).model_dump(mode="json")
        gradient = replay | {"estimator": "gradient", "queries": 1, "effective_batch": batch}
        if batch > MICRO_BATCH:
            gradient["micro_batch"] = MICRO_BATCH
        program_rows = {
            settings["estimator"]: [
                _measure_program(workspace, Recipe(**(settings | {"precision": precision}))) for precision in PRECISIONS
            ]
            for settings in (replay, gradient)
        }
    first_order_peak, checkpointed_peak = (row["peak_rss_bytes"] for row in first_order_rows)
    rows = [*first_order_rows, *(row for estimator_rows in program_rows.values() for row in estimator_rows)]
    for row in rows:
        row |= {"comparison": "peak memory", "over_first_order": row["peak_rss_bytes"] / first_order_peak}
    gradient_peak = program_rows["gradient"][-1]["peak_rss_bytes"]
    return rows, {
        "peak_memory_vs_first_order": program_rows["replay"][0]["over_first_order"],
        "peak_memory_vs_first_order_int8": program_rows["replay"][-1]["over_first_order"],
        "gradient_peak_memory_vs_first_order": gradient_peak / first_order_peak,
        "gradient_peak_memory_vs_checkpointed": gradient_peak / checkpointed_peak,
    }


def _measure_program(workspace: Workspace, recipe: Recipe) -> Row:
    directory = workspace.file("product", recipe.id[:24])
    columns = {"precision", "queries", "effective_batch", "micro_batch", "sequence_length"}
    label = {"commit": commit(), "who": f"{recipe.estimator}, training and evaluating"}

    def compute() -> Row:
        notes.print(f"peak memory: {recipe.estimator}, {recipe.precision}")
        program = compile_cold(recipe, directory, Path(workspace.source))
        row = label | recipe.model_dump(mode="json", include=columns) | {"peak_rss_bytes": peak_rss(directory)}
        return row | {"weights_bytes": program.size("weights"), "planned_bytes": program.manifest.planned_bytes}

    return dict(load_or_compute(directory / "row.json", compute))


def peak_rss(directory: Path) -> int:
    """Returns the peak resident bytes of a fresh process that alternates steps and scores on a program."""
    return int(run_module("bench.step.memory", str(directory)))


def train_and_score(program: CompiledProgram) -> int:
    """Runs steps and scores in this process and returns its peak resident bytes."""
    recipe = program.recipe
    examples = program.examples("train")[: recipe.score_rows]
    runtime = program.open()
    for number in range(2):
        batch = pack_step(examples[: recipe.effective_batch], recipe)
        if recipe.estimator == "gradient":
            runtime.gradient_step(batch, Rates(1e-3))
        else:
            runtime.step(batch, query_seeds(0, number, recipe.queries), 1e-3, DEFAULT_EPS[recipe.precision])
        runtime.score(next(iter(pack_score(examples, recipe))).inputs)
    runtime.close()
    return peak_rss_bytes()


if __name__ == "__main__":
    print(train_and_score(reopen(Path(json.loads(sys.argv[1])))))
