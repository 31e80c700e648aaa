"""Losses of preferences and their gradients in eager PyTorch, against autograd of TRL's formulas on the stock model."""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.methods.preferences import example_count, preference_losses
from server.compiler.methods.step_inputs import StepInputs
from shared.recipe import Recipe
from shared.zo.lora import flat_size
from tests.server.compiler import reference
from tests.server.compiler.conftest import VOCABULARY, batch_inputs, eager_gradient_step, one

BETA = 0.3
WEIGHTS = {"dpo": (1.0, -1.0, 1.0, -1.0, 1.0, -1.0), "kto": (1.5, 0.0, -0.5, 0.0, 1.5, 0.0)}


def trl_loss(loss, logps, reference_logps, weights):
    """The mean loss of rows (E,), as `DPOTrainer` (sigmoid) and `KTOTrainer` (kto) of TRL 1.16 compute it."""
    ratios = logps - reference_logps
    if loss == "dpo":
        delta_score = ratios[0::2] - ratios[1::2]
        return -logsigmoid(BETA * delta_score).mean()
    kl = ratios[1::2].mean().detach().clamp(min=0)
    chosen, rejected = weights[0::2] > 0, weights[0::2] < 0
    chosen_losses = 1 - torch.sigmoid(BETA * (ratios[0::2][chosen] - kl))
    rejected_losses = 1 - torch.sigmoid(BETA * (kl - ratios[0::2][rejected]))
    weighted = (weights[0::2][chosen] * chosen_losses, -weights[0::2][rejected] * rejected_losses)
    return torch.cat(weighted).mean()


def logps_of(logits, batch):
    """Log-probabilities (E,) of the rows' answers, from logits (E, T, V)."""
    truth = torch.from_numpy(batch.choices[..., :1].astype(np.int64))
    by_token = torch.log_softmax(logits, -1).gather(2, truth)[..., 0]
    return (by_token * torch.from_numpy(batch.mask)).sum(1)


def case(base, **settings):
    """A recipe, its batch, some B, reference log-probabilities near those at B, and the base's facts."""
    recipe, rng = base.recipe(optimizer="sgd", effective_batch=6, **settings), np.random.default_rng(3)
    facts = load_checkpoint(str(base.directory)).facts
    batch = reference.random_batch(rng, recipe, VOCABULARY)
    flat = 0.1 * rng.standard_normal(flat_size(recipe, facts)).astype(np.float32)
    with torch.no_grad():
        logps = logps_of(reference.answer_logits(base.model, recipe, facts, flat, batch), batch)
    return recipe, batch, flat, logps - torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0, 1.0]), facts


def step_tensors(recipe, batch, logps):
    return [*batch_inputs(recipe, batch), logps, torch.tensor(WEIGHTS[recipe.loss]), one(BETA)]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("layers", ["all", "last:1"])
def test_the_loss_and_its_gradient_are_trls(tiny, loss, layers):
    recipe, batch, flat, logps, facts = case(tiny, estimator="gradient", loss=loss, layers=layers)
    b = torch.from_numpy(flat.copy()).requires_grad_()
    own = logps_of(reference.answer_logits(tiny.model, recipe, facts, b, batch), batch)
    expected_loss = trl_loss(loss, own, logps, torch.tensor(WEIGHTS[loss]))
    (expected,) = torch.autograd.grad(expected_loss, b)
    step = eager_gradient_step(tiny, recipe)
    step.state.assign(torch.from_numpy(flat))
    tokens, *inputs = step_tensors(recipe, batch, logps)
    with torch.no_grad():
        value, gradient = step.differentiate(tokens, StepInputs.of(recipe, [*inputs, one(0), one(np.inf), one(0)]))
    np.testing.assert_allclose(value, [expected_loss.item()], rtol=1e-5)
    assert torch.linalg.vector_norm(gradient - expected) < 1e-5 * torch.linalg.vector_norm(expected)


def test_pairs_in_micro_batches_add_up(tiny):
    """Also with an absent pair, as the trainer never leaves one but a caller may."""
    whole, batch, flat, logps, _ = case(tiny, estimator="gradient", loss="dpo")
    results = []
    for rows in (None, 2):
        recipe = Recipe.model_validate(whole.model_dump() | {"micro_batch": rows})
        step = eager_gradient_step(tiny, recipe)
        step.state.assign(torch.from_numpy(flat))
        tokens, *inputs = step_tensors(recipe, batch, logps)
        named = StepInputs.of(recipe, [*inputs, one(0), one(np.inf), one(0)])
        named.weights[4:] = 0
        with torch.no_grad():
            results.append((*step.differentiate(tokens, named), example_count(named)))
    (value, gradient, count), (in_parts, summed, _) = results
    assert float(count) == 2
    np.testing.assert_allclose(in_parts, value, rtol=1e-5)
    assert torch.linalg.vector_norm(summed - gradient) < 1e-5 * torch.linalg.vector_norm(gradient)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_the_difference_of_two_paths_is_the_losses_derivative(tiny, loss):
    """What estimators `replay` and `stored` measure: with KTO the divergence does not differ between the paths."""
    recipe, batch, _, logps, _ = case(tiny, estimator="gradient", loss=loss)
    inputs = StepInputs(
        mask=torch.from_numpy(batch.mask), reference=logps, weights=torch.tensor(WEIGHTS[loss]), beta=one(BETA)
    )
    at = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)) * 4
    change = torch.rand(6, 2, generator=torch.Generator().manual_seed(2)) - 0.5
    losses, _ = preference_losses(recipe, torch.cat((at + 1e-2 * change, at - 1e-2 * change)), inputs)
    centre, slopes = preference_losses(recipe, at, inputs)
    assert losses.shape == (2, 3)
    assert centre.shape == (1, 3)
    difference = (losses[0] - losses[1]).sum() / 2e-2
    expected = (slopes[0] * (change * inputs.mask).sum(1)).sum()
    np.testing.assert_allclose(float(difference), float(expected), rtol=1e-3)
