"""Programs that compute logits of a few positions at once, against those that compute all together."""

import numpy as np
import pytest
import torch

from server.compiler.methods.training import picked_log_probabilities
from server.compiler.model.vocabulary_head import HeadLayer, HeadReverse, SoftmaxHead
from server.compiler.program import compile_program
from shared import program as interface
from shared.program_inputs import TOKEN_DTYPE
from tests.server.compiler import reference
from tests.server.compiler.conftest import VOCABULARY, Program, make_tiny


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_lowered_softmax_gives_exact_gradients(cap):
    """Of a loss and of its reverse pass against autograd, also where a token's probability is 0 in float32."""
    draw = torch.Generator().manual_seed(6)
    table, truth = torch.randn(50, 8, generator=draw), torch.tensor([[[3], [7], [0]]])
    answers = torch.randn(1, 3, 8, generator=draw)
    answers[0, 2] = -100.0 * table[0]
    answers.requires_grad_()
    logits = answers @ table.T
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    expected = torch.log_softmax(logits, -1).gather(2, truth)
    (gradient,) = torch.autograd.grad(torch.logsumexp(logits, -1).sum(), answers)
    head = SoftmaxHead(HeadLayer(table, None), HeadReverse(table), cap)
    capped, softmax, product = head(answers)
    torch.testing.assert_close(picked_log_probabilities(capped, softmax, truth), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(product, gradient, rtol=1e-5, atol=1e-5)
    assert cap is not None or float(expected.detach()[0, 2, 0]) < -150


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "gradient", "optimizer": "momentum", "queries": 1, "precision": "int8", "layers": "last:1"},
        {"estimator": "replay", "queries": 2},
    ],
    ids=["gradient int8", "replay"],
)
def test_parts_change_nothing(tmp_path, monkeypatch, settings):
    base = make_tiny(tmp_path / "base", seed=5, hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    recipe = base.recipe(loss="full", answer_length=5, effective_batch=4, **settings)
    batch = reference.random_batch(np.random.default_rng(7), recipe, VOCABULARY)
    draw, r, t = np.random.default_rng(8), recipe.score_rows, recipe.answer_length
    shapes = ((VOCABULARY, (r, recipe.sequence_length)), (recipe.sequence_length, (r, t)), (VOCABULARY, (r, t, 3)))
    inputs = [draw.integers(0, bound, shape).astype(TOKEN_DTYPE) for bound, shape in shapes]
    outputs = []
    for name, most in (("whole", interface.MAX_LOGITS), ("parts", 3 * VOCABULARY)):
        monkeypatch.setattr(interface, "MAX_LOGITS", most)
        kept = tmp_path / "kept"  # the layers below the logits are lowered once
        manifest = compile_program(recipe, str(base.directory), tmp_path / name, inference=False, kept=kept)
        program = Program(tmp_path / name, manifest)
        program.load_some_b()
        rest = (0.01, np.inf, 0.0)
        if recipe.estimator == "replay":
            rest = (np.arange(4, dtype=np.int32).reshape(2, 2), 0.01, 0.05)
        losses, _ = program.step(batch, *rest)
        scores = program("score", *inputs)
        outputs.append((losses, program("adapter")[0], scores[0]))
    for whole, parts in zip(*outputs, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=2e-5, atol=2e-6)
