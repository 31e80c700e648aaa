"""The Hugging Face form of a Llama checkpoint: config.json and safetensors files.

Knows this form's names and options only. An option that changes the arithmetic is refused, never ignored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from server.compiler.base import BaseFacts, BaseFiles, Rope
from shared.errors import UnreadableCheckpoint, UnsupportedModel

SUPPORTED = ("llama",)
TOP_NAMES = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head",
}
LAYER_NAMES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},
}
LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
DERIVED_PATTERN = re.compile(r".*rotary_emb\.inv_freq")  # old checkpoints store what rope_theta already says


def hf_facts(files: BaseFiles) -> BaseFacts:
    """The facts in config.json. Raises UnreadableCheckpoint or UnsupportedModel."""
    try:
        config = json.loads((files.root / "config.json").read_text(encoding="utf-8"))
        model_type = config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableCheckpoint("config.json is not a model configuration with a model_type") from error
    if model_type not in SUPPORTED:
        raise UnsupportedModel(f"architecture {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}")
    _refuse_features(config)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return BaseFacts(
            architecture=model_type,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
            context_length=config["max_position_embeddings"],
            sha256=files.sha256,
            form="huggingface",
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=Rope(theta=_rope(config).get("rope_theta", 10000.0)),
            attention_scale=(config.get("head_dim") or hidden // heads) ** -0.5,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            parameters=_parameters(files, bool(config.get("tie_word_embeddings", False))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableCheckpoint(f"config.json lacks a usable value: {error}") from error


def hf_checkpoint(files: BaseFiles) -> tuple[BaseFacts, dict[str, torch.Tensor]]:
    """The facts, and every weight as float32 by canonical name. Raises UnreadableCheckpoint or UnsupportedModel."""
    facts = hf_facts(files)
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(files):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if not DERIVED_PATTERN.fullmatch(name):
                        tensors[_canonical(name)] = file.get_tensor(name).to(torch.float32)
        except (SafetensorError, OSError) as error:
            raise UnreadableCheckpoint(f"{path.name} is not a whole safetensors file ({error})") from error
    return facts, tensors


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, which newer configurations keep in `rope_parameters`."""
    return {**config, **(config.get("rope_parameters") or {})}


def _refuse_features(config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found = {
        f"RoPE scaling {kind!r}": kind != "default",
        "partial rotary embedding": _rope(config).get("partial_rotary_factor", 1.0) not in (None, 1.0),
        "sliding-window attention": bool(config.get("sliding_window")),
        "attention biases": bool(config.get("attention_bias")),
        "MLP biases": bool(config.get("mlp_bias")),
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "quantized weights": bool(config.get("quantization_config")),
    }
    if names := [name for name, present in found.items() if present]:
        raise UnsupportedModel(f"this llama checkpoint uses {', '.join(names)}, which the decoder does not compute")


def _canonical(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise UnsupportedModel(f"tensor {name} has no place in the supported llama decoder")
    return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}"


def _weight_files(files: BaseFiles) -> list[Path]:
    return [path for path in files.pinned if path.suffix == ".safetensors"]


def _parameters(files: BaseFiles, tied: bool) -> int:
    total = 0
    for path in _weight_files(files):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if not DERIVED_PATTERN.fullmatch(name) and not (tied and name == "lm_head.weight"):
                        size = 1
                        for dimension in file.get_slice(name).get_shape():
                            size *= dimension
                        total += size
        except (SafetensorError, OSError) as error:
            raise UnreadableCheckpoint(f"{path.name} is not a whole safetensors file ({error})") from error
    return total
