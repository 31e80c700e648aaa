"""The cells of the grid: a contender, an engine, a precision, a sequence length and a batch.

qE = batch, so that all cells of one length and batch process the same amount of data, as in the paper's tables.
Sequences hold random tokens of exactly the stated length, with one answer token and two candidates.
"""

from collections.abc import Iterable
from enum import StrEnum
from itertools import product
from typing import Literal

from pydantic import BaseModel, ConfigDict

from bench.baselines.steps import Grouping
from shared.recipe import BaseRef, Precision, Recipe

Engine = Literal["eager", "compile", "executorch"]
Device = Literal["cpu", "cuda"]
CellPrecision = Precision | Literal["fp16"]
Extent = Literal["quick", "plain", "full"]
LENGTHS, BATCHES, QUERIES = (64, 128, 256), (1, 8, 16), (1, 4, 16)


class Contender(StrEnum):
    """The method that makes the step."""

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
BOTH_QUERIES = (Contender.OUTER, Contender.MOBIZO)  # with q = 1 they are MEZO_LORA_FA and INNER
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
        who = "".join(letter if letter.isalnum() else "-" for letter in self.contender.name.lower())
        return f"{who}.{self.engine}.{self.precision}.{self.device}.s{self.length}.b{self.batch}.q{self.queries}"

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
        found = _grid(Contender, ("eager", "compile"), precisions=("fp32", "fp16"), device=device)
    elif extent != "full":  # all of PyTorch eager, the telling part of ExecuTorch, torch.compile (a minute a cell) once
        found = [
            *_grid(Contender, ("eager",)),
            *_grid((Contender.FO_LORA_FA, mezo, mobizo), ("compile",), (64,), (8,), queries=(1, 4)),
            *_grid((mezo, inner), ("executorch",), queries=(1,)),
            *_grid((mobizo,), ("executorch",), batches=(16,), queries=(4, 16)),
            *_grid((inner, Contender.OUTER), ("executorch",), (64,), (16,), queries=(4, 16)),
            *_grid((mezo, inner), ("executorch",), (64,), BATCHES, ("int8", "int4"), queries=(1,)),
            *_grid((mobizo,), ("executorch",), (64, 256), (16,), ("int8", "int4"), queries=(4,)),
        ]
    else:
        zeroth = (mezo, inner, Contender.OUTER, mobizo)
        found = [
            *_grid(Contender, ("eager", "compile")),
            *_grid(zeroth, ("executorch",), precisions=("fp32", "int8", "int4")),
        ]
    found = sorted(dict.fromkeys(found), key=lambda cell: cell.length * cell.batch)
    if extent != "quick":
        return found
    # The smallest cell of every contender and engine.
    first = {(cell.engine, cell.engine == "compile" or cell.contender): cell for cell in reversed(found)}
    return sorted(first.values(), key=lambda cell: cell.length * cell.batch)


def _grid(
    contenders: Iterable[Contender],
    engines: tuple[Engine, ...],
    lengths: tuple[int, ...] = LENGTHS,
    batches: tuple[int, ...] = BATCHES,
    precisions: tuple[CellPrecision, ...] = ("fp32",),
    device: Device = "cpu",
    queries: tuple[int, ...] = QUERIES,
) -> list[Cell]:
    """Returns the product of all, without the cells that are equal to others: q must divide the batch."""
    return [
        Cell(contender=who, engine=engine, precision=precision, length=s, batch=b, queries=q, device=device)
        for s, b, precision, engine, who, q in product(lengths, batches, precisions, engines, contenders, queries)
        if b % q == 0 and not (who in ONE_QUERY and q > 1) and not (who in BOTH_QUERIES and q == 1)
    ]
