"""The real 135M model: our decoder, PEFT and llama.cpp give the same answers over 100 prompts."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.registry.exports.gguf import gguf_lora
from shared.recipe import TARGETS
from tests.server.compiler.conftest import eager_logits
from tests.server.gguf_files import rewrite
from tests.server.peft_directory import write_peft
from tests.server.registry.exports.stock import LlamaCpp, adapted, next_token, prompts, with_peft

PROMPTS = 100


@pytest.mark.acceptance
@pytest.mark.slow
def test_the_same_answers_from_every_format(smollm2_gguf, tmp_path):
    settings = {"targets": TARGETS, "rank": 8, "alpha": 16, "layers": "last:50%"}
    base = adapted(str(smollm2_gguf), settings)
    flat = 0.1 * base.flat
    arguments = (base.recipe, base.shape, flat, base.a_sha256)
    write_peft(*arguments, tmp_path / "peft")
    (tmp_path / "adapter.gguf").write_bytes(gguf_lora(*arguments))
    tokens = prompts(PROMPTS, 12, base.shape.vocabulary)
    stock = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    plain = next_token(stock, tokens)
    longer = torch.from_numpy(tokens[:10].reshape(2, 60))
    with torch.no_grad():
        ours = eager_logits(load_checkpoint(str(smollm2_gguf)), longer)
        assert float((ours - stock(longer).logits).abs().max()) < 1e-3
    theirs = with_peft(stock, tmp_path / "peft")
    expected = next_token(theirs, tokens)
    assert (plain.argmax(1) != expected.argmax(1)).sum() > PROMPTS / 10  # the adapter decides
    llama = LlamaCpp(rewrite(smollm2_gguf, tmp_path / "base.gguf"), tmp_path / "adapter.gguf", threads=2)
    tops = [llama.top(row) for row in tokens]
    assert [token for token, _ in tops] == expected.argmax(1).tolist()
    np.testing.assert_allclose([value for _, value in tops], expected.max(1), atol=1e-3)
