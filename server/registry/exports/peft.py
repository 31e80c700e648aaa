"""Writes an adapter as a PEFT directory, which stock `peft` loads onto the stock model. Needs no torch.

PEFT computes y = W x + (alpha / r) B A x with A (r, in) and B (out, r); a program's matrices are their transposes.
"""

from __future__ import annotations

import json

import safetensors.numpy

from server.registry.exports.frozen_a import Place, by_module, joined
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, LoraModule, file_rows, hf_module_name, module_names

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # where PEFT's wrapper holds the model


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

    def place_of(module: LoraModule) -> Place:
        kind = shape.of_layer(module.layer)
        stem, rows = file_rows(kind, module.target)
        parent = module.name.removesuffix(hf_module_name(kind, module.target))
        return Place(f"{PREFIX}{parent}{stem}", module_names(kind).fused.get(stem, (module.target,)), rows)

    adapted = joined(recipe, shape, flat, a_sha256, calibration)
    tensors: dict[str, F32] = {}
    for name, (a, b) in by_module(recipe, shape, adapted, place_of).items():
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
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
    names, layers = module_names(shape), recipe.adapted_layers(shape.layers)
    kinds = dict.fromkeys(shape.of_layer(layer) for layer in layers)
    by_kind = [[file_rows(kind, target)[0] for target in recipe.targets] for kind in kinds]
    ranks = {stem: recipe.rank * own.count(stem) for own in by_kind for stem in own if own.count(stem) > 1}
    stems = list(dict.fromkeys(stem for own in by_kind for stem in own))
    leaves = [stem.rpartition(".")[2] for stem in stems]
    clear = len(set(leaves)) == len(stems)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or recipe.base.name,
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.0,
        "target_modules": leaves if clear else stems,
        "bias": "none",
        "fan_in_fan_out": shape.architecture == "gpt2",  # its weights are (in, out)
        "inference_mode": True,
    }
    if ranks:
        config["rank_pattern"] = ranks
        config["alpha_pattern"] = {stem: recipe.alpha * rank / recipe.rank for stem, rank in ranks.items()}
    if "language_model" in names.layers:  # another part of the model has linear layers of the same names
        config["target_modules"] = [f"{names.layers}.{layer}.{stem}" for layer in layers for stem in stems]
    elif recipe.layers != "all":
        config["layers_to_transform"] = list(layers)
        config["layers_pattern"] = names.layers.rpartition(".")[2]
    return config
