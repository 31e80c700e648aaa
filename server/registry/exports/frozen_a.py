"""The frozen A of a version, drawn again and held against the fingerprint that the version was trained with.

Every format that joins B with A takes it from here. Needs NumPy alone.
"""

from __future__ import annotations

import hashlib

from shared.errors import AMismatch, InvalidUpload
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, LoraModule, frozen_a, lora_modules

Adapted = tuple[LoraModule, F32, F32]  # a module, its A (in, r) and its B (r, out)


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
