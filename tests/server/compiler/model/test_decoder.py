"""The export-friendly decoder's logits against transformers, on tiny random Llamas.

Other architectures: `test_architectures.py`. SmolLM2-135M: tests/server/registry/exports/test_smollm2.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from server.compiler.checkpoints.checkpoint import load_checkpoint
from tests.server.compiler.conftest import eager_logits, make_tiny


def largest_difference(source: str, stock: nn.Module, sequence: int) -> float:
    """Over every position's logits of random tokens, B zero."""
    checkpoint = load_checkpoint(source)
    tokens = torch.randint(0, checkpoint.facts.vocabulary, (2, sequence), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((eager_logits(checkpoint, tokens) - stock(tokens).logits).abs().max())


@pytest.mark.parametrize(
    "overrides",
    [
        {},  # as Llama 2 and TinyLlama: untied
        {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2},  # as SmolLM
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rms_norm_eps": 1e-5},
    ],
)
def test_logits_of_tiny_random_llamas(tmp_path: Path, overrides: dict) -> None:
    base = make_tiny(tmp_path / "base", seed=3, **overrides)
    assert largest_difference(str(base.directory), base.model, 33) < 1e-4
