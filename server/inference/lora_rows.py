"""MP-LoRA over adapters of any recipe: each row of a batch has its own adapter.

The arithmetic is that of a training step's paths: the base's product for all rows at once, one product with A for
neighbouring rows whose recipes share it, and one batched product for their B.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shared.recipe import Recipe, Target
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, flat_size, frozen_a, lora_modules

Place = tuple[int, Target]  # of a linear layer: decoder layer, target


class Projections:
    """The frozen A of recipes that share it, scaled, and the place of each B in flat B."""

    def __init__(self, recipe: Recipe, shape: BaseShape, calibration: Calibration | None = None) -> None:
        """calibration: the one that the recipe names, if it names one."""
        self.rank, self.size = recipe.rank, flat_size(recipe, shape)
        self.a: dict[Place, Tensor] = {}  # (alpha / r) A^T, (r, in)
        self.places: dict[Place, tuple[int, int]] = {}  # of B in flat B: offset, out
        for module in lora_modules(recipe, shape):
            place = (module.layer, module.target)
            scaled = np.ascontiguousarray(frozen_a(recipe, module, calibration).T) * np.float32(recipe.scale)
            self.a[place] = torch.from_numpy(scaled)
            self.places[place] = (module.offset, module.out_features)
        self.nbytes = sum(a.nbytes for a in self.a.values())


class ServedAdapter:
    """One adapter's B (D,), and the projections that its recipe shares with others."""

    def __init__(self, projections: Projections, flat: F32) -> None:
        """flat: float32 (D,)."""
        self.projections = projections
        self._flat = torch.from_numpy(np.ascontiguousarray(flat))
        self.nbytes = int(flat.nbytes)

    def b(self, place: Place) -> Tensor:
        """B (r, out) of one linear layer, a view."""
        offset, out = self.projections.places[place]
        return self._flat[offset : offset + self.projections.rank * out].view(-1, out)


class AdaptedRows:
    """The adapters of a batch's rows."""

    def __init__(self, adapters: Sequence[ServedAdapter | None]) -> None:
        """adapters: of each row; None: the base alone."""
        self._runs: list[tuple[int, list[ServedAdapter]]] = []  # first row, and the adapters of it and the next rows
        start = 0
        for _, run in groupby(adapters, key=lambda adapter: None if adapter is None else id(adapter.projections)):
            rows = list(run)
            if neighbours := [adapter for adapter in rows if adapter is not None]:
                self._runs.append((start, neighbours))
            start += len(rows)

    def add(self, place: Place, x: Tensor, y: Tensor) -> None:
        """Adds (x A) B of each row's own adapter to y (R, S, out), in place; x (R, S, in)."""
        for start, adapters in self._runs:
            a = adapters[0].projections.a.get(place)
            if a is not None:
                rows = slice(start, start + len(adapters))
                b = torch.stack([adapter.b(place) for adapter in adapters])  # (rows, r, out)
                y[rows].baddbmm_(functional.linear(x[rows], a), b)
