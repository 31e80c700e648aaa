"""MP-LoRA over adapters of any recipe: rows of one batch, each group of which meets the B of its own adapter.

The same arithmetic as a training step's paths: the base's product for all rows at once, one product with A for all rows
whose recipes share it, and one batched product for the many B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shared.recipe import Recipe, Target
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, flat_size, frozen_a, lora_modules

Place = tuple[int, Target]  # of a linear layer: decoder layer, target
Family = tuple[object, ...]


def family_of(recipe: Recipe, shape: BaseShape) -> Family:
    """The parts of a recipe that determine A and the layout of B: rank, alpha, targets, layers and the origin of A."""
    source = (recipe.a_seed, recipe.calibration)
    return (recipe.rank, recipe.alpha, recipe.targets, recipe.adapted_layers(shape.layers), *source)


class Projections:
    """The frozen A of a family of recipes, scaled, and where each B lies in flat B."""

    def __init__(self, recipe: Recipe, shape: BaseShape, calibration: Calibration | None = None) -> None:
        """calibration: the one that the recipe names, if it names one."""
        self.family = family_of(recipe, shape)
        self.rank, self.size = recipe.rank, flat_size(recipe, shape)
        self.a: dict[Place, Tensor] = {}  # (alpha / r) A^T, (r, in)
        self.places: dict[Place, tuple[int, int]] = {}  # of B in flat B: offset, out
        for module in lora_modules(recipe, shape):
            place = (module.layer, module.target)
            scaled = np.ascontiguousarray(frozen_a(recipe, module, calibration).T) * np.float32(recipe.scale)
            self.a[place] = torch.from_numpy(scaled)
            self.places[place] = (module.offset, module.out_features)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(a.nbytes for a in self.a.values())


class ServedAdapter:
    """One adapter's B (D,), and the projections that its recipe shares with others."""

    def __init__(self, projections: Projections, flat: F32) -> None:
        """flat: float32 (D,). Raises ValueError for another shape."""
        if flat.shape != (projections.size,):
            raise ValueError(f"B of shape {flat.shape} for a recipe of size {projections.size}")
        self.projections = projections
        self.flat = torch.from_numpy(np.ascontiguousarray(flat))

    @property
    def nbytes(self) -> int:
        """Memory that it takes besides its projections."""
        return int(self.flat.nbytes)

    def b(self, place: Place) -> Tensor:
        """B (r, out) of one linear layer, a view."""
        offset, out = self.projections.places[place]
        return self.flat[offset : offset + self.projections.rank * out].view(-1, out)


@dataclass(frozen=True)
class _Block:
    """Adapters of one family with equally many rows each, in consecutive rows."""

    adapters: tuple[ServedAdapter, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class _FamilyRows:
    """Consecutive rows of one family."""

    projections: Projections
    blocks: tuple[_Block, ...]
    start: int
    stop: int


class AdaptedRows:
    """The rows of a batch, sorted so that rows of one adapter, and of one family, are adjacent."""

    def __init__(self, adapters: Sequence[ServedAdapter | None]) -> None:
        """adapters: of each row; None: the base alone."""
        counts: dict[int, int] = {}
        for adapter in adapters:
            counts[id(adapter)] = counts.get(id(adapter), 0) + 1
        families = {family: number for number, family in enumerate(_families(adapters))}

        def place(row: int) -> tuple[int, int, int]:
            adapter = adapters[row]
            family = -1 if adapter is None else families[adapter.projections.family]
            return family, counts[id(adapter)], id(adapter)

        self.order = sorted(range(len(adapters)), key=place)  # rows of the batch, by their number outside
        ranks = [place(row) for row in self.order]
        self._family_rows: list[_FamilyRows] = []
        at = 0
        for family, members in groupby(ranks, key=lambda rank: rank[0]):
            blocks, start = [], at
            for count, block in groupby(members, key=lambda rank: rank[1]):
                stop = at + len(list(block))
                members_of_block = tuple(adapters[row] for row in self.order[at:stop:count])
                blocks.append(_Block(tuple(each for each in members_of_block if each is not None), at, stop))
                at = stop
            if family >= 0:
                self._family_rows.append(_FamilyRows(blocks[0].adapters[0].projections, tuple(blocks), start, at))

    def add(self, place: Place, x: Tensor, y: Tensor) -> None:
        """Adds (x A) B of each row's own adapter to y (R, S, out), in place; x (R, S, in)."""
        for family_rows in self._family_rows:
            a = family_rows.projections.a.get(place)
            if a is None:
                continue
            low = functional.linear(x[family_rows.start : family_rows.stop], a)  # (rows, S, r)
            for block in family_rows.blocks:
                start, rank = family_rows.start, family_rows.projections.rank
                count, out = len(block.adapters), y.shape[-1]
                low_rows = low[block.start - start : block.stop - start]
                part, into = low_rows.view(count, -1, rank), y[block.start : block.stop].view(count, -1, out)
                if count == 1:
                    into[0].addmm_(part[0], block.adapters[0].b(place))
                else:
                    into.baddbmm_(part, torch.stack([adapter.b(place) for adapter in block.adapters]))


def _families(adapters: Sequence[ServedAdapter | None]) -> list[Family]:
    return list(dict.fromkeys(adapter.projections.family for adapter in adapters if adapter is not None))
