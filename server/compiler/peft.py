"""An adapter as a PEFT directory, which stock `peft` loads onto the stock model.

PEFT computes y = W x + (alpha / r) B A x with A (r, in) and B (out, r); a program's matrices are their transposes.
Needs numpy and safetensors; knows no torch and no runtime.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from shared.errors import InvalidUpload
from shared.lora import F32, BaseShape, flat_size, hf_module_name, init_a, lora_modules
from shared.recipe import Recipe

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # where PEFT's wrapper holds the model
LAYERS_PATTERN = "layers"  # what every architecture calls its list of decoder layers


def write_peft(recipe: Recipe, shape: BaseShape, flat: F32, directory: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors into `directory` (made if absent).

    flat: B, float32 (D,). Raises InvalidUpload when it is not of the recipe's size.
    """
    tensors = peft_tensors_file(recipe, shape, flat)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TENSORS_NAME).write_bytes(tensors)
    (directory / CONFIG_NAME).write_bytes(peft_config_file(recipe, shape))


def peft_tensors_file(recipe: Recipe, shape: BaseShape, flat: F32) -> bytes:
    """adapter_model.safetensors; the same bytes at every call. Raises InvalidUpload when B is not of the recipe's size.

    flat: B, float32 (D,).
    """
    size = flat_size(recipe, shape)
    if flat.shape != (size,):
        raise InvalidUpload(f"B has shape {list(flat.shape)}; this recipe's is [{size}]")
    tensors: dict[str, F32] = {}
    for module in lora_modules(recipe, shape):
        name = f"{PREFIX}{module.name}"
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(init_a(recipe, module).T)  # (r, in)
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(module.b(flat).T)  # (out, r)
    return safetensors.numpy.save(tensors, metadata={"format": "pt"})


def peft_config_file(recipe: Recipe, shape: BaseShape) -> bytes:
    """adapter_config.json."""
    return (json.dumps(peft_config(recipe, shape), indent=2, sort_keys=True) + "\n").encode()


def peft_config(recipe: Recipe, shape: BaseShape) -> dict[str, object]:
    """What adapter_config.json says; everything it leaves out is PEFT's default."""
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": recipe.base.name,
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
