"""The frozen A of a version, drawn again and held against the fingerprint that the version was trained with.

Every format that joins B with A takes it from here. Needs NumPy alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.errors import AMismatch, InvalidUpload
from shared.recipe import Recipe, Target
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, LoraModule, frozen_a, lora_modules

Adapted = tuple[LoraModule, F32, F32]  # a module, its A (in, r) and its B (r, out)


@dataclass(frozen=True)
class Place:
    """Where a format holds a target's matrices.

    name: of the module, which may hold several targets. rows: (out,), the row there of each row here; None: the same.
    """

    name: str
    targets: tuple[Target, ...]
    rows: NDArray[np.int64] | None


def joined(
    recipe: Recipe, shape: BaseShape, flat: F32, a_sha256: str, calibration: Calibration | None = None
) -> list[Adapted]:
    """Returns every adapted module with its matrices, in flat-B order. flat: B, float32 (D,).

    a_sha256: the fingerprint (`shared.zo.lora.a_fingerprint`) of the A that B was trained with. calibration: the one
    that the recipe names, if it names one. Raises AMismatch if A as made here has another fingerprint, InvalidUpload if
    B is not of the recipe's size, InvalidRecipe without the calibration.
    """
    modules = lora_modules(recipe, shape)
    size = modules[-1].offset + modules[-1].size
    if flat.shape != (size,):
        raise InvalidUpload(f"B has shape {list(flat.shape)}; this recipe's is [{size}]")
    digest, adapted = hashlib.sha256(), []
    for module in modules:
        a = frozen_a(recipe, module, calibration)
        digest.update(a.astype("<f4", copy=False).tobytes())
        adapted.append((module, a, module.b(flat)))
    if digest.hexdigest() != a_sha256:
        raise AMismatch(
            f"this adapter was trained with a frozen A of fingerprint {a_sha256[:12]}..., but its recipe gives "
            f"{digest.hexdigest()[:12]}... here; joined with that it would be another adapter, so nothing was made"
        )
    return adapted


def by_module(
    recipe: Recipe, shape: BaseShape, adapted: list[Adapted], place_of: Callable[[LoraModule], Place]
) -> dict[str, tuple[F32, F32]]:
    """Returns A (r', in) and B (out', r') of each module of a format.

    The ranks of a module's adapted targets lie side by side, and each target's B has its own rows.
    """
    matrices: dict[str, tuple[F32, F32]] = {}
    for module, a, b in adapted:
        place = place_of(module)
        parts = [target for target in place.targets if target in recipe.targets]
        width, first = len(parts) * module.rank, parts.index(module.target) * module.rank
        out = sum(shape.of_layer(module.layer).features(target)[1] for target in place.targets)
        empty = (np.zeros((width, len(a)), np.float32), np.zeros((out, width), np.float32))
        joined_a, joined_b = matrices.setdefault(place.name, empty)
        joined_a[first : first + module.rank] = a.T
        joined_b[slice(None) if place.rows is None else place.rows, first : first + module.rank] = b.T
    return matrices
