"""The built-in base and task: a random Llama of a few thousand weights, and sentences labelled by their words.

Two sources, movies and products, share some words and have others of their own, so devices' data can differ. A fixed
seed makes the base the same in every simulation.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
MAX_TOKENS = 64
SHARED_WORDS = (("great", "good", "fine", "lovely"), ("terrible", "bad", "poor", "awful"))  # positive, negative
SOURCE_WORDS = {
    "movies": (
        ("funny", "warm", "bright", "moving", "clever", "gripping"),
        ("dull", "tedious", "bore", "flat", "clumsy", "stale"),
    ),
    "products": (
        ("sturdy", "fast", "sharp", "handy", "quiet", "cheap"),
        ("broken", "slow", "noisy", "weak", "leaking", "scratched"),
    ),
}
NEUTRAL_WORDS = ("the", "a", "film", "plot", "cast", "camera", "phone", "screen", "really", "It", "was")
UNKNOWN = "?"
LABELS = ("positive", "negative")
SURPLUS = 1.5  # sentences per requested example, so that shards can have any proportion of labels


def vocabulary() -> dict[str, int]:
    """Returns the token of every word."""
    words = [
        *NEUTRAL_WORDS,
        *SHARED_WORDS[0],
        *SHARED_WORDS[1],
        *(word for word_lists in SOURCE_WORDS.values() for word_list in word_lists for word in word_list),
    ]
    return {word: number for number, word in enumerate([UNKNOWN, *words])}


def write_base(directory: Path) -> None:
    """Writes the model and its tokenizer as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    rng, size = np.random.default_rng(0), len(vocabulary())
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (size, HIDDEN), "model.norm": (HIDDEN,)}
    linear = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in linear.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": (rng.normal(0, 0.3, shape) if len(shape) == 2 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    # Small final norm, so that the untrained model's answers have similar probabilities.
    tensors["model.norm.weight"] *= np.float32(0.25)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": size,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def write_task(directory: Path, examples: int, test: int) -> tuple[Path, ...]:
    """Writes one directory with train.jsonl and test.jsonl for each source. Both labels are equally frequent.

    examples, test: number of examples needed over all sources.
    """
    rng = np.random.default_rng(1)
    counts = {"train": math.ceil(examples * SURPLUS / len(SOURCE_WORDS)), "test": math.ceil(test / len(SOURCE_WORDS))}
    directories = []
    for source in SOURCE_WORDS:
        source_directory = directory / source
        source_directory.mkdir(parents=True, exist_ok=True)
        for split, count in counts.items():
            lines = (json.dumps(_record(rng, source, index % 2)) + "\n" for index in range(count))
            (source_directory / f"{split}.jsonl").write_text("".join(lines))
        directories.append(source_directory)
    return tuple(directories)


def _record(rng: np.random.Generator, source: str, label_index: int) -> dict[str, Any]:
    """Returns a sentence with two or three words that determine its label. label_index: 0 positive, 1 negative."""
    label_words = [*SHARED_WORDS[label_index], *SOURCE_WORDS[source][label_index]]
    words = [*rng.choice(label_words, rng.integers(2, 4)), *rng.choice(NEUTRAL_WORDS[:-2], rng.integers(2, 5))]
    return {"text": " ".join(rng.permutation(words)), "label": LABELS[label_index]}
