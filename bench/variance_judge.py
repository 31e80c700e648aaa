"""Which choice should need fewer steps, by what `bench variance` measured; and where the findings go.

"Steps" are steps to a given small decrease of the loss over the default recipe's (random A, rank 16, q_proj and v_proj
of all layers, q = 4, E = 4), each at its own best learning rate: less is better. Once by D / |g|^2, which knows the
size of the space and the gradient in it; once by `estimator.descent`, which knows curvature too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.estimator import alignment_with_mean, batch_variance, descent
from bench.gradients import Moments
from bench.result import Cell, Plot, Row, Table
from bench.variance_study import RANDOM, Measured
from shared.recipe import layer_indices

QUERIES, EXAMPLES, RANK = 4, 4, 16  # of the default recipe, and what its q E is shared out from
PAIR, VALUE, VALUE_OUT = ("q_proj", "v_proj"), ("v_proj",), ("v_proj", "o_proj")
STEPS = (
    "Steps: relative to random A of rank 16 on q_proj and v_proj of all layers, q = 4, E = 4, each at its own best "
    "learning rate; predicted from held-out gradients by D / |g|^2 and, with curvature, by the second moment of "
    "examples' gradients. They tell how fast training starts, not where it ends."
)


@dataclass
class Found:
    """What goes into the result. base: the model's name."""

    base: str
    rows: list[Row] = field(default_factory=list)
    claims: dict[str, float] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    def claim(self, name: str, value: Cell) -> None:
        """Names a number; what could not be known is not claimed."""
        if isinstance(value, int | float):
            self.claims[name] = float(value)

    def table(self, name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], notes: str) -> None:
        """Adds a table, and its lines as rows."""
        lines = tuple(tuple(row) for row in rows)
        notes = f"{self.base}, at B = 0. {notes}"
        self.tables.append(Table(name=name, title=title, columns=tuple(columns), rows=lines, notes=notes))
        self.rows += [{"table": name, **dict(zip(columns, line, strict=True))} for line in lines]


@dataclass(frozen=True)
class Judged:
    """One choice at one rank on some layers: its moments and D, beside the default's."""

    moments: Moments
    size: int
    default: tuple[Moments, int]

    def steps(self, queries: int = QUERIES, examples: int = EXAMPLES) -> Cell:
        """By curvature; None where too few examples were seen to know the gradient."""
        here = descent(self.moments, queries, examples) if self.moments.known else 0.0
        return descent(self.default[0], QUERIES, EXAMPLES) / here if here > 0 else None

    @property
    def steps_by_size(self) -> Cell:
        """By D / |g|^2."""
        default, size = self.default
        return self.size / self.moments.signal / (size / default.signal) if self.moments.known else None

    @property
    def cosine_squared(self) -> float:
        """E cos^2 of an estimate of the default q and E with the many-example gradient."""
        share = 1 / (1 + batch_variance(self.moments, EXAMPLES)) if self.moments.known else 0.0
        return alignment_with_mean(QUERIES, self.size, share)


def judge(measured: Measured, name: str, rank: int, targets: Sequence[str], layers: str = "all") -> Judged:
    """A choice of A on some targets and layers."""
    count = 1 + max(module.layer for module in measured.modules)

    def of(name: str, rank: int, targets: Sequence[str], layers: str) -> tuple[Moments, int]:
        names = measured.names(targets, layer_indices(layers, count))
        return measured.recorder.moments(name, rank, names), measured.size(rank, names)

    return Judged(*of(name, rank, targets, layers), of(RANDOM, RANK, PAIR, "all"))


def said(targets: Sequence[str]) -> str:
    """Targets in a cell."""
    return ", ".join(target.removesuffix("_proj") for target in targets)


def slug(name: str) -> str:
    """A claim's part."""
    kept = "".join(letter if letter.isalnum() else "_" for letter in name.replace("(the paper's)", ""))
    return "_".join(part for part in kept.split("_") if part)
