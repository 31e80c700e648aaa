"""Writes an adapter as a PEFT directory, which stock `peft` loads onto the stock model. Needs no torch.

PEFT computes y = W x + (alpha / r) B A x with A (r, in) and B (out, r); a program's matrices are their transposes.
"""

from __future__ import annotations

import json

import numpy as np
import safetensors.numpy

from server.registry.exports.frozen_a import joined
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, hf_module_name

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # where PEFT's wrapper holds the model
LAYERS_PATTERN = "layers"  # what every architecture calls its list of decoder layers


def peft_files(
    recipe: Recipe,
    shape: BaseShape,
    flat: F32,
    a_sha256: str,
    calibration: Calibration | None = None,
    base: str | None = None,
) -> dict[str, bytes]:
    """adapter_config.json and adapter_model.safetensors by name; the same arguments give the same bytes.

    flat: B, float32 (D,). a_sha256: fingerprint of the A that B was trained with. calibration: the one that
    the recipe names, if it names one. base: id or directory of the stock model; by default the recipe's name of it.
    Raises AMismatch, InvalidUpload when B is not of the recipe's size, or InvalidRecipe without the calibration.
    """
    tensors: dict[str, F32] = {}
    for module, a, b in joined(recipe, shape, flat, a_sha256, calibration):
        name = f"{PREFIX}{module.name}"
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a.T)  # (r, in)
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b.T)  # (out, r)
    config = json.dumps(peft_config(recipe, shape, base), indent=2, sort_keys=True)
    # One entry of metadata only: safetensors writes several in no fixed order.
    return {
        CONFIG_NAME: f"{config}\n".encode(),
        TENSORS_NAME: safetensors.numpy.save(tensors, metadata={"format": "pt"}),
    }


def peft_config(recipe: Recipe, shape: BaseShape, base: str | None = None) -> dict[str, object]:
    """Returns the content of adapter_config.json. PEFT's defaults apply to all other fields.

    base: id or directory of the stock model, where PEFT's `Auto` classes find it; by default the recipe's name of it.
    """
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or recipe.base.name,
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.0,
        "target_modules": [hf_module_name(shape.architecture, target).split(".")[-1] for target in recipe.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if recipe.layers != "all":
        config["layers_to_transform"] = list(recipe.adapted_layers(shape.layers))
        config["layers_pattern"] = LAYERS_PATTERN
    return config
