"""Which cells the grid has: all of it, what fits an hour or two on two cores, or a few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from bench.cells import FIRST_ORDER, Cell, CellPrecision, Contender, Device, Engine

LENGTHS, BATCHES, QUERIES = (64, 128, 256), (1, 8, 16), (1, 4, 16)
Extent = Literal["quick", "plain", "full"]
ZEROTH = (Contender.MEZO_LORA_FA, Contender.INNER, Contender.OUTER, Contender.MOBIZO)
TORCH: tuple[Engine, ...] = ("eager", "compile")


def cells(extent: Extent, device: Device = "cpu") -> list[Cell]:
    """The grid, in the order in which it is measured: short cells first."""
    if device == "cuda":
        found = _torch(TORCH, LENGTHS, BATCHES, ("fp32", "fp16"), device)
    elif extent == "quick":
        found = _quick()
    elif extent == "plain":
        found = _plain()
    else:
        programs = _grid(ZEROTH, ("executorch",), LENGTHS, BATCHES, ("fp32", "int8", "int4"))
        found = [*_torch(TORCH, LENGTHS, BATCHES), *programs]
    return sorted(dict.fromkeys(found), key=lambda cell: cell.length * cell.batch)


def _grid(
    contenders: Iterable[Contender],
    engines: Iterable[Engine],
    lengths: Iterable[int],
    batches: Iterable[int],
    precisions: Iterable[CellPrecision] = ("fp32",),
    device: Device = "cpu",
    queries: Iterable[int] = QUERIES,
) -> list[Cell]:
    """The product of all, but for cells that are no others: q must divide the batch; with q = 1 there is no outer loop.

    q = 1: OUTER is MEZO_LORA_FA, MOBIZO is INNER. Who is first order, or MeZO, takes q = 1 alone, as in the paper.
    """
    alone = (*FIRST_ORDER, Contender.MEZO_FULL, Contender.MEZO_LORA_FA)
    return [
        Cell(
            contender=contender,
            engine=engine,
            precision=precision,
            length=length,
            batch=batch,
            queries=q,
            device=device,
        )
        for length in lengths
        for batch in batches
        for precision in precisions
        for engine in engines
        for contender in contenders
        for q in queries
        if batch % q == 0
        and (contender not in alone or q == 1)
        and (contender not in (Contender.OUTER, Contender.MOBIZO) or q > 1)
    ]


def _torch(
    engines: Iterable[Engine],
    lengths: Iterable[int],
    batches: Iterable[int],
    precisions: Iterable[CellPrecision] = ("fp32",),
    device: Device = "cpu",
) -> list[Cell]:
    return _grid(Contender, engines, lengths, batches, precisions, device)


def _plain() -> list[Cell]:
    """PyTorch eager whole; ExecuTorch without what differs little; torch.compile, which takes a minute a cell, once."""
    inner, mobizo, mezo = Contender.INNER, Contender.MOBIZO, Contender.MEZO_LORA_FA
    return [
        *_torch(("eager",), LENGTHS, BATCHES),
        *_grid((Contender.FO_LORA_FA, mezo, mobizo), ("compile",), (64,), (8,), queries=(1, 4)),
        *_grid((mezo, inner), ("executorch",), LENGTHS, BATCHES, queries=(1,)),
        *_grid((mobizo,), ("executorch",), LENGTHS, (16,), queries=(4, 16)),
        *_grid((inner, Contender.OUTER), ("executorch",), (64,), (16,), queries=(4, 16)),
        *_grid((mezo, inner), ("executorch",), (64,), BATCHES, ("int8", "int4"), queries=(1,)),
        *_grid((mobizo,), ("executorch",), (64, 256), (16,), ("int8", "int4"), queries=(4,)),
    ]


def _quick() -> list[Cell]:
    """Every contender and every engine at length 64, on as few sequences as its loops need."""
    inner, mobizo, mezo = Contender.INNER, Contender.MOBIZO, Contender.MEZO_LORA_FA
    return [
        *_torch(("eager",), (64,), (1,)),
        *_grid((Contender.OUTER, mobizo), ("eager",), (64,), (8,), queries=(4,)),
        *_grid((inner,), ("compile",), (64,), (1,), queries=(1,)),
        *_grid((mezo, inner), ("executorch",), (64,), (1,), queries=(1,)),
        *_grid((mobizo,), ("executorch",), (64,), (8,), ("fp32", "int8"), queries=(4,)),
    ]
