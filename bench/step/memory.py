"""Peak memory of our programs against first-order LoRA-FA in PyTorch, each in a process of its own.

Ours is the product: the server's program in the agent's runtime, training and evaluating in turn; its peak is that of
the whole process. First order is its step alone, with and without checkpointing, and its peak counts from when the
model has been loaded. Model, targets, layers, number of sequences and length are the same.
"""

import json
import sys
from pathlib import Path

from bench.programs import Compiled, compile_cold, reopen
from bench.result import Claims, Row, commit, notes
from bench.runner import kept, run_module
from bench.step.grid import Place, measure, open_place
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
    with open_place(keep, base) as place:
        theirs = []
        for who in (Contender.FO_LORA_FA, Contender.FO_CHECKPOINTING):
            cell = Cell(contender=who, engine="eager", length=length, batch=batch)
            notes.print(f"peak memory: {cell.label}")
            theirs.append(measure(cell, place, rounds=1, seconds=FIRST_ORDER_SECONDS))
            if "peak_rss_bytes" not in theirs[-1]:
                raise SystemExit(f"{cell.label} was not measured: {theirs[-1]}")
        ours = Cell(contender=Contender.MOBIZO, engine="executorch", length=length, batch=batch, queries=queries)
        replay = ours.recipe(place.base).model_dump(mode="json")
        exact = replay | {"estimator": "gradient", "queries": 1, "effective_batch": batch}
        if batch > MICRO_BATCH:
            exact["micro_batch"] = MICRO_BATCH
        found = {
            settings["estimator"]: [_ours(place, Recipe(**(settings | {"precision": each}))) for each in PRECISIONS]
            for settings in (replay, exact)
        }
    first, checkpointed = (row["peak_rss_bytes"] for row in theirs)
    rows = [*theirs, *(row for several in found.values() for row in several)]
    for row in rows:
        row |= {"comparison": "peak memory", "over_first_order": row["peak_rss_bytes"] / first}
    gradient = found["gradient"][-1]["peak_rss_bytes"]
    return rows, {
        "peak_memory_vs_first_order": found["replay"][0]["over_first_order"],
        "peak_memory_vs_first_order_int8": found["replay"][-1]["over_first_order"],
        "gradient_peak_memory_vs_first_order": gradient / first,
        "gradient_peak_memory_vs_checkpointed": gradient / checkpointed,
    }


def _ours(place: Place, recipe: Recipe) -> Row:
    directory = place.file("product", recipe.id[:24])
    columns = {"precision", "queries", "effective_batch", "micro_batch", "sequence_length"}
    about = {"commit": commit(), "who": f"{recipe.estimator}, training and evaluating"}

    def measured() -> Row:
        notes.print(f"peak memory: {recipe.estimator}, {recipe.precision}")
        program = compile_cold(recipe, directory, Path(place.source))
        row = about | recipe.model_dump(mode="json", include=columns) | {"peak_rss_bytes": peak_rss(directory)}
        return row | {"weights_bytes": program.size("weights"), "planned_bytes": program.manifest.planned_bytes}

    return dict(kept(directory / "row.json", measured))


def peak_rss(directory: Path) -> int:
    """Returns the peak resident bytes of a fresh process that alternates steps and scores on a program."""
    return int(run_module("bench.step.memory", str(directory)))


def train_and_score(program: Compiled) -> int:
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
