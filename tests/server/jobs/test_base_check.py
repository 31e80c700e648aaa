"""`mobizo-server base check`: what a base could do, from its configuration and headers alone."""

import json

import pytest

from server.compiler.checkpoints import checkpoint
from server.compiler.checkpoints.hub import download
from server.jobs.base_check import check_base
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from tests.server.cli.conftest import call

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub whose only model has this configuration, and no weights here."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    monkeypatch.setattr(checkpoint, download.__name__, lambda source, patterns: tmp_path)
    return tmp_path


def test_a_model_of_the_hub_is_checked_by_its_configuration(hub):
    check = check_base("acme/qwen3")
    assert check.shape.architecture == "qwen3"
    assert check.parameters == 596_049_920  # as the Hub shows for Qwen/Qwen3-0.6B
    assert check.chat_template
    assert check.precisions["int8"].estimators == ("replay", "stored", "gradient", "directional")
    assert check.precisions["int4"].estimators == ("replay", "stored")
    needs = check.precisions["int8"].device_bytes
    assert 0.6e9 < needs["replay"] < needs["gradient"] < check.precisions["fp32"].device_bytes["gradient"]


def test_the_command_prints_it(hub):
    assert "qwen3, 596 M parameters, 28 layers, 40,960 tokens of context" in call("base", "check", "acme/qwen3")
    assert json.loads(call("base", "check", "acme/qwen3", "--json"))["precisions"]["int8"]["device_bytes"]["replay"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe"}, "it is a mixture of experts; the nearest supported: qwen3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by awq .* a GGUF file of it"),
    ],
)
def test_what_is_not_supported_says_what_is(hub, changes, message):
    (hub / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    with pytest.raises(UnsupportedModel, match=message):
        check_base("acme/qwen3")


def test_sizes_that_cannot_be_are_refused(hub):
    (hub / "config.json").write_text(json.dumps({**QWEN3, "num_attention_heads": 0}))
    with pytest.raises(UnreadableCheckpoint, match="usable value"):
        check_base("acme/qwen3")
