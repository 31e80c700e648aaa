"""The cells of the grid, and `python -m bench.step.process JSON`, which measures one in a process of its own.

A cell is a contender, an engine, a precision, a sequence length and a batch. qE = batch, so that all cells of one
length and batch process the same amount of data, as in the paper's tables. Sequences hold random tokens of exactly the
stated length, with one answer token and two candidates. Only the step is measured: the peak is that of resident memory
after the model has been loaded. The process can also write a program that other processes load.
"""

import ctypes
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from bench.baselines.adapted import AdaptedModel
from bench.baselines.mezo_program import Passes, emit_passes
from bench.baselines.rounding import load_model
from bench.baselines.steps import EagerMobizo, FirstOrder, FullFirstOrder, FullMezo, Grouping
from bench.programs import Batch, Methods, random_batch
from bench.result import Row
from device_agent.memory import peak_rss_bytes, rss_bytes
from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.backends.xnnpack import Xnnpack
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.export.weights import StoredKeys
from shared.recipe import DEFAULT_EPS, BaseRef, Precision, Recipe
from shared.zo.lora import BaseShape, flat_size
from shared.zo.noise import query_seeds

Engine = Literal["eager", "compile", "executorch"]
Device = Literal["cpu", "cuda"]
CellPrecision = Precision | Literal["fp16"]
Extent = Literal["quick", "plain", "full"]
LENGTHS, BATCHES, QUERIES = (64, 128, 256), (1, 8, 16), (1, 4, 16)


class Contender(StrEnum):
    """The training method of a step."""

    FO_FULL = "FO-SGD (full)"
    FO_LORA_FA = "FO-SGD (LoRA-FA)"
    FO_CHECKPOINTING = "FO-SGD (LoRA-FA, checkpointing)"
    MEZO_FULL = "MeZO (full)"
    MEZO_LORA_FA = "MeZO (LoRA-FA)"
    INNER = "MobiZO (inner)"
    OUTER = "MobiZO (outer)"
    MOBIZO = "MobiZO (inner + outer)"


FIRST_ORDER = (Contender.FO_FULL, Contender.FO_LORA_FA, Contender.FO_CHECKPOINTING)
ONE_QUERY = (*FIRST_ORDER, Contender.MEZO_FULL, Contender.MEZO_LORA_FA)  # as in the paper
SEVERAL_QUERIES = (Contender.OUTER, Contender.MOBIZO)  # equal to MEZO_LORA_FA and INNER with q = 1
GROUPINGS: dict[Contender, Grouping] = {
    Contender.MEZO_FULL: "sequential",
    Contender.MEZO_LORA_FA: "sequential",
    Contender.INNER: "inner",
    Contender.OUTER: "outer",
    Contender.MOBIZO: "both",
}


class Cell(BaseModel):
    """One measurement. fp16: weights and activations on a GPU; first order uses autocast, as in the paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    contender: Contender
    engine: Engine
    length: int
    batch: int
    queries: int = 1
    precision: CellPrecision = "fp32"
    device: Device = "cpu"

    @property
    def name(self) -> str:
        """Returns a file name."""
        method = "".join(letter if letter.isalnum() else "-" for letter in self.contender.name.lower())
        return f"{method}.{self.engine}.{self.precision}.{self.device}.s{self.length}.b{self.batch}.q{self.queries}"

    @property
    def label(self) -> str:
        """Returns the name in tables."""
        return self.contender if self.contender in FIRST_ORDER else f"{self.contender}, q = {self.queries}"

    def recipe(self, base: BaseRef) -> Recipe:
        """Returns the recipe: LoRA-FA of rank 16 on the default targets of all layers."""
        return Recipe(
            base=base,
            queries=self.queries,
            effective_batch=self.batch // self.queries,
            sequence_length=self.length,
            precision="fp32" if self.precision == "fp16" else self.precision,
            answer_length=1,
            choices=2,
            loss="candidates",
        )


def cells(extent: Extent, device: Device = "cpu") -> list[Cell]:
    """Returns the grid in the order in which it is measured, short cells first."""
    inner, mobizo, mezo = Contender.INNER, Contender.MOBIZO, Contender.MEZO_LORA_FA
    if device == "cuda":
        grid = _product(Contender, ("eager", "compile"), precisions=("fp32", "fp16"), device=device)
    elif (
        extent != "full"
    ):  # all of PyTorch eager, the informative part of ExecuTorch, torch.compile (a minute a cell) once
        grid = [
            *_product(Contender, ("eager",)),
            *_product((Contender.FO_LORA_FA, mezo, mobizo), ("compile",), (64,), (8,), queries=(1, 4)),
            *_product((mezo, inner), ("executorch",), queries=(1,)),
            *_product((mobizo,), ("executorch",), batches=(16,), queries=(4, 16)),
            *_product((inner, Contender.OUTER), ("executorch",), (64,), (16,), queries=(4, 16)),
            *_product((mezo, inner), ("executorch",), (64,), BATCHES, ("int8", "int4"), queries=(1,)),
            *_product((mobizo,), ("executorch",), (64, 256), (16,), ("int8", "int4"), queries=(4,)),
        ]
    else:
        zeroth_order = (mezo, inner, Contender.OUTER, mobizo)
        grid = [
            *_product(Contender, ("eager", "compile")),
            *_product(zeroth_order, ("executorch",), precisions=("fp32", "int8", "int4")),
        ]
    grid = sorted(dict.fromkeys(grid), key=lambda cell: cell.length * cell.batch)
    if extent != "quick":
        return grid
    # The smallest cell of every contender and engine.
    smallest = {(cell.engine, cell.engine == "compile" or cell.contender): cell for cell in reversed(grid)}
    return sorted(smallest.values(), key=lambda cell: cell.length * cell.batch)


def _product(
    contenders: Iterable[Contender],
    engines: tuple[Engine, ...],
    lengths: tuple[int, ...] = LENGTHS,
    batches: tuple[int, ...] = BATCHES,
    precisions: tuple[CellPrecision, ...] = ("fp32",),
    device: Device = "cpu",
    queries: tuple[int, ...] = QUERIES,
) -> list[Cell]:
    """Returns all combinations without duplicates; q must divide the batch."""
    return [
        Cell(
            contender=contender,
            engine=engine,
            precision=precision,
            length=length,
            batch=batch,
            queries=count,
            device=device,
        )
        for length, batch, precision, engine, contender, count in product(
            lengths, batches, precisions, engines, contenders, queries
        )
        if batch % count == 0
        and not (contender in ONE_QUERY and count > 1)
        and not (contender in SEVERAL_QUERIES and count == 1)
    ]


LR = 1e-4
Step = Callable[[Batch, int], Any]


class ProcessTask(BaseModel):
    """The task of one process: measure a cell, or compile its program."""

    action: Literal["measure", "compile"]
    cell: Cell
    source: str  # the base model in a form that the compiler reads
    base: BaseRef
    shape: BaseShape
    program: str = ""
    weights: str = ""
    rounds: int = 3
    seconds: float = 60.0  # after this time no further round begins


def measure(task: ProcessTask) -> Row:
    """Returns the seconds of every round after a warm-up, and the peak memory over all of them."""
    cell, recipe = task.cell, task.cell.recipe(task.base)
    step = program_step(task) if cell.engine == "executorch" else torch_step(task)
    loaded = reset_peak()
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) <= task.rounds and not (len(seconds) > 1 and time.perf_counter() - start > task.seconds):
        batch = random_batch(recipe, task.shape.vocabulary, cell.length, len(seconds))
        step_start = time.perf_counter()
        step(batch, len(seconds))
        seconds.append(time.perf_counter() - step_start)
        if len(seconds) == 1 and cell.engine == "compile":
            reset_peak()  # without the compiler's own memory
    first, *step_seconds = seconds
    row = {"seconds": step_seconds, "first_seconds": first, "loaded_bytes": loaded, "peak_rss_bytes": peak_rss_bytes()}
    return row | ({"peak_gpu_bytes": torch.cuda.max_memory_allocated()} if cell.device == "cuda" else {})


def reset_peak() -> int:
    """Returns freed memory to the system and resets the peak where Linux allows it. Returns the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if (refs := Path("/proc/self/clear_refs")).exists():
        refs.write_text("5")
    return rss_bytes()


def torch_step(task: ProcessTask) -> Step:
    """Returns a step of a PyTorch contender."""
    cell, shape = task.cell, task.shape
    recipe, first_order, half = cell.recipe(task.base), cell.contender in FIRST_ORDER, cell.precision == "fp16"
    model = load_model(task.source, cell.device, "float16" if half and not first_order else "float32")
    learner: Any
    if cell.contender == Contender.FO_FULL:
        learner = FullFirstOrder(model, recipe, shape)
    elif first_order:
        learner = FirstOrder(model, recipe, shape, checkpointing=cell.contender == Contender.FO_CHECKPOINTING)
    elif cell.contender == Contender.MEZO_FULL:
        learner = FullMezo(model, recipe, shape)
    else:
        learner = EagerMobizo(AdaptedModel(model, recipe, shape), GROUPINGS[cell.contender])
    if cell.engine == "compile":
        model.model.compile()

    def run(batch: Batch, number: int) -> None:
        if first_order:
            with torch.autocast(cell.device, torch.float16, enabled=half):
                learner.step(batch, LR)
        else:
            learner.step(batch, query_seeds(0, number, recipe.queries), LR, DEFAULT_EPS["fp32"])
        if cell.device == "cuda":
            torch.cuda.synchronize()

    return run


def program_step(task: ProcessTask) -> Step:
    """Returns a step of a program that `write_program` wrote."""
    cell, recipe = task.cell, task.cell.recipe(task.base)
    program, weights, eps = Path(task.program), Path(task.weights), DEFAULT_EPS[recipe.precision]
    if cell.contender != Contender.MOBIZO:
        passes = Passes(recipe, flat_size(recipe, task.shape), program, weights, GROUPINGS[cell.contender])
        return lambda batch, number: passes.step(batch, query_seeds(0, number, recipe.queries), LR, eps)
    methods = Methods(program, weights, ["adapter", "step"])
    scalars = np.array([LR], np.float32), np.array([eps], np.float32)
    return lambda batch, number: methods("step", *batch, query_seeds(0, number, recipe.queries), *scalars)


def write_program(task: ProcessTask) -> Row:
    """Compiles the program of the cell, and the weights file if its precision has none yet."""
    start = time.perf_counter()
    cell, program, weights = task.cell, Path(task.program), Path(task.weights)
    recipe, target = cell.recipe(task.base), Xnnpack()
    if not weights.exists():
        partial_file = weights.with_suffix(".part")
        target.write_weights(QuantizedBase.of(load_checkpoint(task.source), recipe.precision).stored, partial_file)
        partial_file.rename(weights)
    partial_file = program.with_suffix(".part")
    if cell.contender == Contender.MOBIZO:
        base = QuantizedBase.of(load_checkpoint(task.source), recipe.precision)
        stored = StoredKeys(base.stored)
        methods = BaseNetwork(recipe, base, partial(target.lower, stored=stored)).methods()
        target.emit({name: methods[name] for name in ("adapter", "step")}, stored, partial_file)
    else:
        emit_passes(recipe, task.source, partial_file, GROUPINGS[cell.contender])
    partial_file.rename(program)
    return {"compile_seconds": time.perf_counter() - start}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    process_task = ProcessTask.model_validate_json(sys.argv[1])
    print(json.dumps({"measure": measure, "compile": write_program}[process_task.action](process_task)))
