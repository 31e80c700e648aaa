"""GGUF bases, written by llama.cpp's rules: our decoder computes what transformers and llama.cpp compute."""

import gguf
import numpy as np
import pytest
import torch

from server.compiler.checkpoints.checkpoint import inspect_base, load_checkpoint
from shared.errors import UnsupportedModel
from tests.server.compiler.conftest import eager_logits
from tests.server.registry.exports.stock import LlamaCpp, make_base, prompts, write_gguf

BASES = ("llama", "qwen2", "qwen3", "gemma3_text-deep")
LENGTH = 12  # three windows of the tiny Gemma


@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_transformers_and_llama_cpp(tmp_path, name):
    base = make_base(tmp_path / "base", name)
    path = write_gguf(base, tmp_path / "base.gguf")
    ours, theirs = inspect_base(str(path)), inspect_base(str(base.directory))
    excluded_fields = {"sha256", "form", "norm_eps", "context_length"}
    assert ours.model_dump(exclude=excluded_fields) == theirs.model_dump(exclude=excluded_fields)
    tokens = torch.from_numpy(prompts(4, LENGTH))
    with torch.no_grad():
        expected = base.model()(tokens).logits
        logits = eager_logits(load_checkpoint(str(path)), tokens)
    assert float((logits - expected).abs().max()) < 1e-4
    likeliest = torch.log_softmax(expected[:, -1], -1).max(1)
    llama = LlamaCpp(path)
    answers = [llama.top(row) for row in tokens.tolist()]
    assert [token for token, _ in answers] == likeliest.indices.tolist()
    np.testing.assert_allclose([value for _, value in answers], likeliest.values, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("qwen3", "qwen3.attention.sliding_window", 8, "sliding-window attention"),
        ("gemma3_text", "gemma3.attention.sliding_window_pattern", 3, "a sliding-window pattern of 3"),
        ("gemma3_text", "gemma3.final_logit_softcapping", 30.0, "soft caps"),
        ("qwen2", "qwen2.rope.dimension_count", 4, "rope.dimension_count 4"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(tmp_path, monkeypatch, name, key, value, reason):
    base = make_base(tmp_path / "base", name)
    begin = gguf.GGUFWriter.add_block_count

    def add(writer, count):
        begin(writer, count)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", add)
    with pytest.raises(UnsupportedModel, match=reason):
        inspect_base(str(write_gguf(base, tmp_path / "base.gguf")))
