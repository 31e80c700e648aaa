"""The export-friendly decoder's logits against transformers, on tiny random models and on SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from server.compiler.checkpoint import load_checkpoint
from server.compiler.methods import Trunk
from server.compiler.program import decoder_layers
from shared.lora import flat_size
from shared.recipe import BaseRef, Recipe
from tests.server.compiler.conftest import make_tiny


def largest_difference(source: str, stock: nn.Module, sequence: int) -> float:
    """Over every position's logits of random tokens, B zero."""
    checkpoint = load_checkpoint(source)
    recipe = Recipe(
        base=BaseRef(name="base", sha256=checkpoint.facts.sha256),
        queries=1,
        effective_batch=1,
        sequence_length=sequence,
        answer_length=1,
        choices=1,
    )
    trunk = Trunk(
        recipe,
        checkpoint.facts,
        decoder_layers(recipe, checkpoint),
        checkpoint.embedding,
        checkpoint.norms,
        checkpoint.lm_head,
    )
    tokens = torch.randint(0, checkpoint.facts.vocabulary, (2, sequence), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = nn.functional.embedding(tokens, checkpoint.embedding)
        positions = torch.arange(sequence).repeat(2, 1)
        b = torch.zeros(2, flat_size(recipe, checkpoint.facts))
        logits = trunk.answers(hidden, positions, b) @ trunk.head.T
        return float((logits - stock(tokens).logits).abs().max())


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rms_norm_eps": 1e-5},
    ],
)
def test_logits_of_tiny_random_models(tmp_path: Path, overrides: dict) -> None:
    base = make_tiny(tmp_path / "base", seed=3, **overrides)
    assert largest_difference(str(base.directory), base.model, 33) < 1e-5


@pytest.mark.acceptance
def test_logits_of_smollm2(smollm2_gguf: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    assert largest_difference(str(smollm2_gguf), stock, 64) < 1e-3
