"""Exact-gradient steps and their optimizers in eager PyTorch, against autograd on the stock model and torch.optim."""

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.methods import estimators
from server.compiler.methods.optimizers import OptimizedB, state_size
from server.compiler.methods.step_inputs import StepInputs
from server.compiler.methods.training import Replay
from server.compiler.model import vocabulary_head
from server.compiler.model.rounding import ROWS, quantize
from shared.recipe import Recipe
from shared.zo.lora import flat_size, lora_modules
from shared.zo.noise import direction as direction_of
from shared.zo.noise import query_seeds
from shared.zo.replay import replay
from shared.zo.trajectory import Trajectory, TrajectoryHeader
from tests.server.compiler import reference
from tests.server.compiler.conftest import VOCABULARY, batch_inputs, eager_gradient_step, make_tiny, one

SIZE, STEPS = 37, 6
RULES = {
    "sgd": ("sgd", lambda b: torch.optim.SGD([b], lr=0.1)),
    "momentum": ("momentum", lambda b: torch.optim.SGD([b], lr=0.1, momentum=0.9)),
    "adam": ("adam", lambda b: torch.optim.Adam([b], lr=0.1)),
    "adamw": ("adam", lambda b: torch.optim.AdamW([b], lr=0.1, weight_decay=0.3)),
}


def step_inputs(recipe, batch, lr):
    return [*batch_inputs(recipe, batch), one(lr), one(np.inf), one(0.0)]


def eager_step(base, recipe, flat):
    """The recipe's step at B, its layers as they are."""
    step = eager_gradient_step(base, recipe)
    step.state.assign(torch.from_numpy(flat))
    return step


def check_gradient(base, **settings):
    """One step of plain gradient descent at rate 1 from a random B, against autograd."""
    recipe = base.recipe(estimator="gradient", optimizer="sgd", **settings)
    facts, rng = load_checkpoint(str(base.directory)).facts, np.random.default_rng(7)
    flat = 0.1 * rng.standard_normal(flat_size(recipe, facts)).astype(np.float32)
    batch = reference.random_batch(rng, recipe, VOCABULARY)
    expected_loss, expected = reference.gradient(base.model, recipe, facts, flat, batch)
    with torch.no_grad():
        step = eager_step(base, recipe, flat)
        loss, norm = step(*step_inputs(recipe, batch, 0.0))
        gradient = gradient_of(step, recipe, batch)
    np.testing.assert_allclose(loss, [expected_loss], rtol=1e-5)
    np.testing.assert_allclose(norm, [np.linalg.norm(expected)], rtol=1e-5)
    assert np.linalg.norm(gradient.numpy() - expected) / np.linalg.norm(expected) < 1e-5
    for module in lora_modules(recipe, facts):  # each by itself: a small one would hide among the others
        part, expected_part = module.b(gradient.numpy()), module.b(expected)
        assert np.linalg.norm(part - expected_part) < 1e-4 * np.linalg.norm(expected_part), module.name


def gradient_of(step, recipe, batch):
    """The step's gradient (D,) at its current B."""
    tokens, *inputs = step_inputs(recipe, batch, 0.0)
    return step.differentiate(tokens, StepInputs.of(recipe, inputs))[1]


@pytest.mark.parametrize(
    ("layers", "tied", "loss"),  # a frozen prefix, a gap, frozen layers above
    [("last:1", True, "full"), ("last:1", False, "candidates"), ((0, 2), True, "candidates"), ((1,), False, "full")],
)
def test_the_gradient_is_autograds_for_every_part_of_the_layers(tmp_path, loss, tied, layers):
    base = make_tiny(tmp_path, seed=2, num_hidden_layers=3, tie_word_embeddings=tied)
    check_gradient(base, layers=layers, loss=loss, answer_length=3)


def divergence_loss(model, recipe, facts, b, start, batch, weight):
    """mean nll + weight x mean KL(start || B) of the answer tokens, over what the recipe's loss is over."""

    def log_p(flat):
        logits = reference.answer_logits(model, recipe, facts, flat, batch)
        if recipe.loss == "candidates":
            logits = logits.gather(2, torch.from_numpy(batch.choices.astype(np.int64)))
            logits = logits.masked_fill(torch.from_numpy(batch.choice_mask) == 0, -1e9)
        return torch.log_softmax(logits, -1)

    ours, mask = log_p(b), torch.from_numpy(batch.mask)
    divergence = kl_div(ours, log_p(start).detach(), reduction="none", log_target=True).sum(2)
    nll = reference.mean_loss(reference.answer_logits(model, recipe, facts, b, batch), recipe, batch)
    return nll + weight * (divergence * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("name", "settings"),  # over the vocabulary at once, in parts by a softmax head or not, and the answer alone
    [
        ("llama", {"loss": "full"}),
        ("qwen3", {"loss": "full", "backend": "portable"}),
        ("qwen2", {"loss": "full", "layers": "last:1", "sequence_length": 16, "micro_batch": 1}),
        ("gemma3_text", {"loss": "candidates"}),
    ],
)
def test_the_gradient_with_a_divergence_from_the_start_is_autograds(architectures, name, settings):
    base = architectures.base(name)
    recipe = base.recipe(estimator="gradient", optimizer="sgd", kl=True, effective_batch=3, rank=3, **settings)
    facts, rng = load_checkpoint(str(base.directory)).facts, np.random.default_rng(7)
    flat, start = (0.1 * rng.standard_normal((2, flat_size(recipe, facts)))).astype(np.float32)
    batch, weight = reference.random_batch(rng, recipe, VOCABULARY), 0.7
    b = torch.from_numpy(flat.copy()).requires_grad_()
    loss = divergence_loss(base.model, recipe, facts, b, torch.from_numpy(start), batch, weight)
    (expected,) = torch.autograd.grad(loss, b)
    tokens, *inputs = batch_inputs(recipe, batch)
    inputs += [one(weight), torch.from_numpy(start), one(0.0), one(np.inf), one(0.0)]
    with torch.no_grad():
        nll, gradient = eager_step(base, recipe, flat).differentiate(tokens, StepInputs.of(recipe, inputs))
    np.testing.assert_allclose(nll, [reference.gradient(base.model, recipe, facts, flat, batch)[0]], rtol=1e-5)
    assert torch.linalg.vector_norm(gradient - expected) < 1e-5 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(("loss", "layers"), [("full", "last:1"), ("candidates", "all")])
def test_micro_batches_add_up_to_the_whole_batch(tiny, loss, layers):
    whole = tiny.recipe(estimator="gradient", optimizer="sgd", loss=loss, layers=layers, effective_batch=6)
    rng, facts = np.random.default_rng(5), load_checkpoint(str(tiny.directory)).facts
    flat = 0.1 * rng.standard_normal(flat_size(whole, facts)).astype(np.float32)
    batch = reference.random_batch(rng, whole, VOCABULARY)
    with torch.no_grad():
        expected = gradient_of(eager_step(tiny, whole, flat), whole, batch)
        for rows in (1, 2, 3):
            recipe = Recipe.model_validate(whole.model_dump() | {"micro_batch": rows})
            in_parts = gradient_of(eager_step(tiny, recipe, flat), recipe, batch)
            assert torch.linalg.vector_norm(in_parts - expected) < 1e-5 * torch.linalg.vector_norm(expected)


DESCENTS = {
    "sgd": lambda b: torch.optim.SGD([b], lr=1.0),
    "momentum": lambda b: torch.optim.SGD([b], lr=1.0, momentum=0.9),
    "adam": lambda b: torch.optim.Adam([b], lr=1.0),
}


# block: directions at once: one, some, all
@pytest.mark.parametrize(("optimizer", "block"), [("sgd", 1), ("sgd", 3), ("adam", 3), ("adam", 7), ("momentum", 7)])
def test_directional_coefficients_are_projections_of_the_optimizers_direction(tiny, monkeypatch, optimizer, block):
    """Three steps against autograd on the stock model and torch.optim; B is the trajectory's replay, bit for bit."""
    monkeypatch.setattr(estimators, "directions_at_once", lambda queries, size, looped: block)
    recipe = tiny.recipe(estimator="directional", optimizer=optimizer, queries=7, layers="last:1")
    rng, facts, lr = np.random.default_rng(5), load_checkpoint(str(tiny.directory)).facts, 0.25
    flat = 0.1 * rng.standard_normal(flat_size(recipe, facts)).astype(np.float32)
    step, replayed = eager_step(tiny, recipe, flat), Replay(recipe, flat.size)
    replayed.state.assign(torch.from_numpy(flat))
    weights = torch.zeros(flat.size, requires_grad=True)
    rule, steps = DESCENTS[optimizer](weights), []
    for number in range(3):
        batch, seeds = reference.random_batch(rng, recipe, VOCABULARY), query_seeds(3, number, recipe.queries)
        before = step.state.current().numpy()
        *inputs, _, _, _ = step_inputs(recipe, batch, 0.0)
        with torch.no_grad():
            loss, coefficients = step(*inputs, torch.from_numpy(seeds), one(lr), one(0.01))
            replayed(torch.from_numpy(seeds), coefficients)
        steps.append(coefficients.numpy())
        expected_loss, gradient = reference.gradient(tiny.model, recipe, facts, before, batch)
        np.testing.assert_allclose(loss, [expected_loss], rtol=1e-5)
        weights.grad, old_weights = torch.as_tensor(gradient), weights.detach().clone()
        rule.step()
        direction = (old_weights - weights.detach()).numpy()
        z = np.stack([direction_of("rademacher", (int(k0), int(k1)), flat.size) for k0, k1 in seeds])
        # Adam divides by the root of the second moment, which magnifies the rounding of small gradients.
        tolerance = 1e-5 if optimizer != "adam" else 1e-3
        scale = lr / recipe.queries * np.linalg.norm(direction) * np.sqrt(flat.size)
        np.testing.assert_allclose(coefficients, z @ direction * lr / recipe.queries, rtol=0, atol=tolerance * scale)
    header = TrajectoryHeader(
        job_id="j", job_seed=3, recipe_id=recipe.id, noise="rademacher", queries=recipe.queries, size=flat.size
    )
    trajectory = Trajectory(header, steps)
    np.testing.assert_array_equal(step.state.current(), trajectory.replay(flat))
    np.testing.assert_array_equal(step.state.current(), replay(trajectory, flat))
    np.testing.assert_array_equal(step.state.current(), replayed.state.current())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("max_norm", [np.inf, 2.0])
def test_updates_are_those_of_torchs_optimizers(tiny, name, max_norm):
    optimizer, make = RULES[name]
    state = OptimizedB(tiny.recipe(estimator="gradient", optimizer=optimizer), SIZE)
    generator = torch.Generator().manual_seed(3)
    b = torch.randn(SIZE, generator=generator)
    expected = b.clone().requires_grad_()
    rule = make(expected)
    state.assign(b)
    rates = StepInputs(lr=one(0.1), max_norm=one(max_norm), weight_decay=one(0.3 if name == "adamw" else 0.0))
    for _ in range(STEPS):
        gradient = torch.randn(SIZE, generator=generator)
        expected.grad = gradient.clone()
        if max_norm != np.inf:
            norm = torch.nn.utils.clip_grad_norm_([expected], max_norm)
            assert float(norm) > max_norm
        norms = state.update(gradient, rates)
        rule.step()
        np.testing.assert_allclose(norms, [float(gradient.norm())], rtol=1e-6)
        np.testing.assert_allclose(state.current(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_an_assigned_b_begins_the_optimizer_anew(tiny, optimizer):
    state = OptimizedB(tiny.recipe(estimator="gradient", optimizer=optimizer), SIZE)
    rates = StepInputs(lr=one(0.1), max_norm=one(np.inf), weight_decay=one(0.0))
    b, gradient = torch.ones(SIZE), torch.arange(SIZE, dtype=torch.float32)
    assert len(state.optimized) == state_size(optimizer, SIZE)
    state.assign(b)
    state.update(gradient, rates)
    first = state.optimized.clone()
    state.update(gradient, rates)
    assert not torch.equal(state.optimized, first)
    state.assign(b)
    state.update(gradient, rates)
    assert torch.equal(state.optimized, first)


@pytest.mark.parametrize("levels", [vocabulary_head.LEVELS, ()], ids=["in parts", "at once"])
def test_a_quantized_table_is_multiplied_in_parts(monkeypatch, levels):
    """Half of the probability lies on thousands of tokens, none of which is 1/255 of the likeliest one's."""
    generator, vocabulary, hidden = torch.Generator().manual_seed(3), 20_000, 16
    values, scales = quantize(torch.rand(vocabulary, hidden, generator=generator), ROWS)
    tail = torch.rand(1, 2, vocabulary, generator=generator) ** 4
    weights = 0.5 * tail / tail.sum(dim=2, keepdim=True)
    weights[:, :, :3] += torch.tensor([0.3, 0.15, 0.05])
    monkeypatch.setattr(vocabulary_head, "LEVELS", levels)
    product = vocabulary_head.HeadReverse(values)(weights, scales.unsqueeze(1))
    expected = weights.double() @ (values * scales.unsqueeze(1)).double()
    error = (product - expected).norm() / expected.norm()
    assert error < 0.012 if levels else error > 0.1
