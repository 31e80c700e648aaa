"""Base models of known shapes with random weights, written in the Hugging Face form one shard at a time."""

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.device_agent.tiny import write_base

SHARD_BYTES = 1 << 28
NOISE = 1 << 22  # random values; every tensor repeats them
DEVIATION = 0.02
Runs = tuple[tuple[str, str], ...]  # precisions and estimators
RUNS: Runs = (("int8", "replay"), ("int8", "gradient"), ("int8", "directional"))


@dataclass(frozen=True)
class Size:
    """A base model's architecture. runs: the precisions and estimators to measure."""

    model: str
    config: dict[str, Any]
    runs: Runs = RUNS


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }


TIED = {"tie_word_embeddings": True}
SIZES = {
    "SmolLM2-135M": Size("llama", _llama(576, 1536, 30, 9, 3, 49152) | TIED),
    "SmolLM2-360M": Size("llama", _llama(960, 2560, 32, 15, 5, 49152) | TIED),
    "TinyLlama-1.1B": Size("llama", _llama(2048, 5632, 22, 32, 4, 32000), (*RUNS, ("fp32", "replay"))),
    "Llama-3.2-1B": Size("llama", _llama(2048, 8192, 16, 32, 8, 128256) | TIED | {"rope_theta": 500000.0}),
    "OPT-1.3B": Size(
        "opt", _llama(2048, 8192, 24, 32, 32, 50272) | {"word_embed_proj_dim": 2048, "ffn_dim": 8192, **TIED}
    ),
    "Qwen3-1.7B": Size(
        "qwen3",
        _llama(2048, 6144, 28, 16, 8, 151936) | TIED | {"head_dim": 128},
        (*RUNS, ("int4", "gradient"), ("int8", "text"), ("int4", "text")),
    ),
    "Llama2-7B": Size("llama", _llama(4096, 11008, 32, 32, 32, 32000), (("int8", "replay"),)),
}
QUICK = Size("llama", _llama(64, 96, 2, 4, 2, 300) | TIED, (("fp32", "replay"),))


def write_random_base(size: Size, directory: Path) -> int:
    """Writes a checkpoint in bfloat16 to `directory`; returns its number of weights.

    One shard is in memory at a time. Norms are ones and biases zeros; other tensors repeat the same random values.
    """
    write_base(directory)  # its byte-level tokenizer
    (directory / "model.safetensors").unlink()
    config = AutoConfig.for_model(size.model, **size.config)
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"torch_dtype": "bfloat16"}))
    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_parameters())
    values = np.random.default_rng(0).normal(0, DEVIATION, NOISE).astype(np.float32)
    noise = torch.from_numpy(values).to(torch.bfloat16)
    files = split_torch_state_dict_into_shards(weights, max_shard_size=SHARD_BYTES)
    for file, names in files.filename_to_tensors.items():
        save_file({name: random_tensor(noise, name, tuple(weights[name].shape)) for name in names}, directory / file)
    index = {"metadata": {}, "weight_map": files.tensor_to_filename}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(weight.numel() for weight in weights.values())


def random_tensor(noise: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of this shape in bfloat16. noise: (NOISE,).

    Each name begins at another place of the noise, because a compiler stores equal tensors once.
    """
    if len(shape) == 1:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.bfloat16)
    count = math.prod(shape)
    begun = noise.roll(-(zlib.crc32(name.encode()) % len(noise)))
    return begun.repeat(-(-count // len(noise)))[:count].view(shape)
