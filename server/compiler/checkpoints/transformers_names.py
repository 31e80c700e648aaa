"""Yields a base model's weights under transformers' names, and writes its configuration and tokenizer files.

It is used to write models that transformers and other standard programs load.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.compiler.checkpoints.base import BaseFacts, BaseFiles, Rope
from server.compiler.checkpoints.gguf import gguf_architecture, gguf_facts, gguf_tensors
from server.compiler.checkpoints.gguf_file import GgufFile
from server.compiler.checkpoints.hf import DERIVED, NORM_OFFSETS, NORMS, hf_facts, opened
from server.compiler.checkpoints.hf_config import FULL, SLIDING, config_facts
from server.compiler.checkpoints.tokenizer import convert_tokenizer
from shared.errors import UnsupportedModel
from shared.recipe import TARGETS
from shared.zo.lora import hf_module_name

F32 = NDArray[np.float32]
CONFIG = "config.json"
# The files of a Hugging Face model that define its tokenization.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def stock_tensors(files: BaseFiles) -> Iterator[tuple[str, F32]]:
    """Yields every weight as float32 with the name that transformers expects. Raises UnreadableCheckpoint."""
    if files.form == "gguf":
        architecture = gguf_architecture(files)
        for name, tensor in gguf_tensors(files):
            yield _stock_name(architecture, name), _as_stored(architecture, name, tensor.numpy())
        return
    for path in (path for path in files.pinned if path.suffix == ".safetensors"):
        with opened(path) as file:
            names = [name for name in file.keys() if not DERIVED.fullmatch(name)]  # noqa: SIM118 - no mapping
        for name in names:
            with opened(path) as file:  # mapped while it is open, with the pages of one tensor
                tensor = file.get_tensor(name).float().numpy()
            yield name, tensor


def write_stock_files(files: BaseFiles, directory: Path) -> None:
    """Writes the config.json of a float32 model, and the tokenizer files. Raises as `stock_config`."""
    config = stock_config(files)
    if files.form == "gguf":
        convert_tokenizer(files).save_pretrained(directory)
    else:
        for name in TEXT_FILES:
            if (files.root / name).is_file():
                shutil.copyfile(files.root / name, directory / name)
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def stock_config(files: BaseFiles) -> dict[str, Any]:
    """Returns the contents of the config.json of a float32 model.

    Raises UnreadableCheckpoint, or UnsupportedModel if transformers has no configuration of a GGUF file's model.
    """
    if files.form == "gguf":
        config = _gguf_config(files)
    else:
        hf_facts(files)  # raises for an invalid configuration
        config = json.loads((files.root / CONFIG).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # its name before transformers 5
    config["dtype"] = "float32"
    return config


def _stock_name(architecture: str, name: str) -> str:
    """Returns transformers' name of a canonical tensor."""
    parts = name.split(".")
    if len(parts) == 1:
        return f"{_TOP[name]}.weight"
    weight_name, ending = parts[2].removesuffix("_bias"), "bias" if parts[2].endswith("_bias") else "weight"
    norms = {canonical: stock for stock, canonical in NORMS[architecture].items()}
    linears = {target: hf_module_name(architecture, target) for target in TARGETS}
    return f"model.layers.{parts[1]}.{(norms | linears)[weight_name]}.{ending}"


def _as_stored(architecture: str, name: str, values: F32) -> F32:
    """Returns a canonical tensor as transformers stores it."""
    return values - np.float32(NORM_OFFSETS[architecture]) if _is_offset(architecture, name) else values


def _is_offset(architecture: str, name: str) -> bool:
    return architecture in NORM_OFFSETS and name.endswith("norm")


def _gguf_config(files: BaseFiles) -> dict[str, Any]:
    """Returns a configuration with a GGUF file's facts and special tokens."""
    facts, metadata = gguf_facts(files), GgufFile.read(files.root).metadata
    config = _config(facts)
    for name in ("bos", "eos", "unknown", "padding"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token_id"] = number
    config_values = config_facts(config)
    if differing := [key for key, value in config_values.items() if value != getattr(facts, key)]:
        raise UnsupportedModel(
            f"transformers has no configuration with this GGUF file's {', '.join(sorted(differing))}"
        )
    return config


def _config(facts: BaseFacts) -> dict[str, Any]:
    """Returns the fields of transformers' configuration that give these facts."""
    gemma = facts.architecture == "gemma3_text"
    config: dict[str, Any] = {
        "architectures": [CLASSES[facts.architecture]],
        "model_type": facts.architecture,
        "num_hidden_layers": facts.layers,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.intermediate,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocabulary,
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": facts.norm_eps,
        "tie_word_embeddings": facts.tied,
        "rope_parameters": _rope_parameters(facts.rope),
    }
    if not gemma:
        return config | {"hidden_act": "silu"}
    kinds = [SLIDING if layer in facts.sliding_layers else FULL for layer in range(facts.layers)]
    ropes = {FULL: facts.rope, SLIDING: facts.sliding_rope or Rope()}
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(facts.attention_scale**-2),
        "layer_types": kinds,
        "sliding_window": facts.window or facts.context_length,
        "rope_parameters": {kind: _rope_parameters(rope) for kind, rope in ropes.items()},
    }


def _rope_parameters(rope: Rope | None) -> dict[str, Any]:
    """Returns transformers' parameters of a rotary embedding; those of a kind that it lacks give another one."""
    if rope is None or rope.kind not in ("default", "linear"):
        return {"rope_type": "default", "rope_theta": 10000.0}
    scaled = {"factor": rope.factor} if rope.kind == "linear" else {}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **scaled}
