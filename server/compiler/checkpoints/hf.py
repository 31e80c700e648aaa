"""Reads a checkpoint in Hugging Face format: config.json and safetensors files.

It maps each architecture's tensor names and converts tensors to the layout of the decoder. It rejects unknown tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts, BaseFiles
from server.compiler.checkpoints.hf_config import config_facts
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.recipe import TARGETS
from shared.zo.lora import hf_module_name

LLAMA_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
HEAD_NORMS = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
NORMS: Mapping[str, Mapping[str, str]] = {
    "llama": LLAMA_NORMS,
    "qwen2": LLAMA_NORMS,
    "qwen3": {**LLAMA_NORMS, **HEAD_NORMS},
    "opt": {"self_attn_layer_norm": "input_norm", "final_layer_norm": "post_norm"},
    "gemma3_text": {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "post_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
        **HEAD_NORMS,
    },
}
TOP_NAMES = {
    "embed_tokens": "embedding",
    "embed_positions": "positions",
    "norm": "norm",
    "final_layer_norm": "norm",
    "lm_head": "lm_head",
}
PREFIX = re.compile(r"(model\.)?(decoder\.)?")  # checkpoints without the LM head have no `model.` prefix
NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
DERIVED = re.compile(r".*rotary_emb\.inv_freq")  # stored by old checkpoints; derived from rope_theta

NORM_OFFSETS = {"gemma3_text": 1.0}  # norms of this architecture multiply by 1 + weight
UNUSED_POSITIONS = 2  # unused leading rows of OPT's position table


def hf_facts(files: BaseFiles) -> BaseFacts:
    """Returns the facts in config.json. Raises UnreadableCheckpoint or UnsupportedModel."""
    try:
        config = json.loads((files.root / "config.json").read_text(encoding="utf-8"))
        config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableCheckpoint("config.json is not a model configuration with a model_type") from error
    try:
        fields = config_facts(config)
        parameters = _parameters(files, fields["architecture"], fields["tied"])
        return BaseFacts(**fields, sha256=files.sha256, form="huggingface", parameters=parameters)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnreadableCheckpoint(f"config.json lacks a usable value: {error}") from error


def hf_checkpoint(files: BaseFiles) -> tuple[BaseFacts, dict[str, Tensor]]:
    """Returns the facts and all weights, float32 by canonical name. Raises UnreadableCheckpoint, UnsupportedModel."""
    facts = hf_facts(files)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(files):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if not DERIVED.fullmatch(name):
                        own = _canonical(facts.architecture, name)
                        tensors[own] = _as_taken(facts.architecture, own, file.get_tensor(name).to(torch.float32))
        except (SafetensorError, OSError) as error:
            raise UnreadableCheckpoint(f"{path.name} is not a complete safetensors file ({error})") from error
    return facts, tensors


def _canonical(architecture: str, name: str) -> str:
    inner = PREFIX.sub("", name, count=1)
    match = NAME.fullmatch(inner)
    if match is not None:
        layer, stem, kind = match.groups()
        own = TOP_NAMES.get(stem) if layer is None else _layer_names(architecture).get(stem)
        if own is not None:
            ending = "_bias" if kind == "bias" else ""
            return f"{own}{ending}" if layer is None else f"layers.{layer}.{own}{ending}"
    raise UnsupportedModel(f"tensor {name} is not part of the supported {architecture} decoder")


def _layer_names(architecture: str) -> dict[str, str]:
    return {**NORMS[architecture], **{hf_module_name(architecture, target): target for target in TARGETS}}


def _as_taken(architecture: str, name: str, tensor: Tensor) -> Tensor:
    """Returns a tensor in the layout of the decoder."""
    if name == "positions":
        return tensor[UNUSED_POSITIONS:]
    if name.endswith("norm") and architecture in NORM_OFFSETS:
        return tensor + NORM_OFFSETS[architecture]
    return tensor


def _weight_files(files: BaseFiles) -> list[Path]:
    return [path for path in files.pinned if path.suffix == ".safetensors"]


def _parameters(files: BaseFiles, architecture: str, tied: bool) -> int:
    """Returns the number of elements of all tensors; tied tensors count once."""
    total = 0
    for path in _weight_files(files):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if DERIVED.fullmatch(name):
                        continue
                    if not (_canonical(architecture, name) == "lm_head" and tied):
                        total += math.prod(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise UnreadableCheckpoint(f"{path.name} is not a complete safetensors file ({error})") from error
    return total
