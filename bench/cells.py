"""One cell of the grid: who makes a step, in which engine and precision, on how long sequences and how many.

`qE = batch`: whoever makes the step, a pass over every path sees `batch` sequences, so that all cells of one length and
batch are one amount of data, as in the paper's tables. Sequences hold random tokens of exactly the stated length, with
one answer token and two candidates. Knows neither how a cell is measured nor where.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from bench.baselines.passes import Grouping, passes
from server.compiler.cost import step_flops
from shared.lora import BaseShape
from shared.recipe import BaseRef, Precision, Recipe

Engine = Literal["eager", "compile", "executorch"]
Device = Literal["cpu", "cuda"]
CellPrecision = Precision | Literal["fp16"]


class Contender(StrEnum):
    """Who makes the step."""

    FO_FULL = "FO-SGD (full)"
    FO_LORA_FA = "FO-SGD (LoRA-FA)"
    FO_CHECKPOINTING = "FO-SGD (LoRA-FA, checkpointing)"
    MEZO_FULL = "MeZO (full)"
    MEZO_LORA_FA = "MeZO (LoRA-FA)"
    INNER = "MobiZO (inner)"
    OUTER = "MobiZO (outer)"
    MOBIZO = "MobiZO (inner + outer)"


FIRST_ORDER = (Contender.FO_FULL, Contender.FO_LORA_FA, Contender.FO_CHECKPOINTING)
FULL = (Contender.FO_FULL, Contender.MEZO_FULL)
GROUPINGS: dict[Contender, Grouping] = {
    Contender.MEZO_FULL: "sequential",
    Contender.MEZO_LORA_FA: "sequential",
    Contender.INNER: "inner",
    Contender.OUTER: "outer",
    Contender.MOBIZO: "both",
}


class Cell(BaseModel):
    """What one process measures.

    fp16: of weights and activations, on a GPU; first order's by autocast, as the paper's.
    """

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
        """A file's name."""
        who = "".join(letter if letter.isalnum() else "-" for letter in self.contender.name.lower())
        return f"{who}.{self.engine}.{self.precision}.{self.device}.s{self.length}.b{self.batch}.q{self.queries}"

    @property
    def label(self) -> str:
        """For a table's row."""
        return self.contender if self.contender in FIRST_ORDER else f"{self.contender}, q = {self.queries}"

    def recipe(self, base: BaseRef) -> Recipe:
        """As a recipe: LoRA-FA of rank 16 on the default targets of all layers."""
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

    def flops(self, base: BaseRef, shape: BaseShape) -> float:
        """Floating-point operations of the step's matrix products.

        First order: a backward pass costs a forward pass for the activations' gradients, another for the weights', and
        one more to make activations again.
        """
        both = step_flops(self.recipe(base), shape)  # 2 qE sequences, forward
        of = {Contender.FO_FULL: 1.5, Contender.FO_LORA_FA: 1.0, Contender.FO_CHECKPOINTING: 1.5}
        return both * of.get(self.contender, 1.0)

    def weight_passes(self) -> int:
        """How often the step reads or writes all weights of the decoder's layers."""
        if self.contender in FIRST_ORDER:
            # full: forward, backward, gradients written, and w -= lr g reads both and writes one
            return {Contender.FO_FULL: 6, Contender.FO_LORA_FA: 2, Contender.FO_CHECKPOINTING: 3}[self.contender]
        forward = len(passes(GROUPINGS[self.contender], self.queries))
        # MeZO (full) walks over all parameters four times a query, reading and writing.
        return forward + (8 * self.queries if self.contender == Contender.MEZO_FULL else 0)
