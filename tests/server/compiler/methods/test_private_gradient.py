"""DP-SGD steps in eager PyTorch: autograd's gradients of single examples, clipped by hand, and the NumPy noise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.methods.private_gradient import BRANCHES, clipped_sum, noise_units
from server.compiler.methods.step_inputs import StepInputs
from shared.privacy import MARGIN, NOISE_KEYS, NOISE_UNITS, UNITS, gradient_contributions, gradient_noise
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference
from tests.server.compiler.conftest import VOCABULARY, batch_inputs, eager_gradient_step, one

SIGMA, EXAMPLES = 0.8, 3
KEYS = np.random.default_rng(3).integers(-(2**31), 2**31, (NOISE_KEYS, 2)).astype(np.int32)


def example_gradients(base, recipe, flat, batch):
    """The gradient of each example's mean loss by autograd on the stock model, (E, D)."""
    shape = load_checkpoint(str(base.directory)).facts
    return np.stack(
        [
            reference.gradient(base.model, recipe, shape, flat, reference.select_rows(batch, [at]))[1]
            for at in range(len(batch.tokens))
        ]
    )


class Private:
    """A private step of a tiny base at some B, called with a secret."""

    def __init__(self, base, **changes):
        self.recipe = base.recipe(
            **{"estimator": "gradient", "privacy": "clipped", "optimizer": "momentum", "effective_batch": EXAMPLES}
            | changes
        )
        self.step = eager_gradient_step(base, self.recipe)
        rng = np.random.default_rng(7)
        self.size = self.step.state.current().shape[0]
        self.flat = 0.1 * rng.standard_normal(self.size).astype(np.float32)
        self.batch = reference.random_batch(rng, self.recipe, VOCABULARY)

    @torch.no_grad()
    def __call__(self, batch, clip, *, last=1.0, keys=KEYS, carried=None):
        self.step.state.assign(torch.from_numpy(self.flat))
        zeros = torch.zeros(self.size, dtype=torch.int32)
        secret = one(clip), one(SIGMA), one(last), torch.from_numpy(keys), zeros if carried is None else carried
        totals, norm = self.step(*batch_inputs(self.recipe, batch), one(0.1), one(np.inf), one(0.0), *secret)
        return totals, norm

    def velocity(self):
        """The mean gradient of the last step: momentum's first velocity."""
        return self.step.state.part(1).numpy()


@pytest.mark.parametrize(("name", "loss"), [("llama", "full"), ("gemma3_text", "candidates")])
def test_the_gradient_is_the_clipped_one_of_autograd_and_the_reference_noise(architectures, name, loss):
    base = architectures.base(name)
    private = Private(base, targets=("q_proj", "v_proj", "down_proj"), loss=loss)
    gradients = example_gradients(base, private.recipe, private.flat, private.batch)
    norms = np.linalg.norm(gradients, axis=1)
    clip = float(np.median(norms))  # one example is clipped, one is not
    assert norms.min() < clip < norms.max()
    clipped_gradients = gradients * np.minimum(1, clip / norms)[:, None]
    _, norm = private(private.batch, clip)
    noise = gradient_noise(KEYS, private.size) * (SIGMA * clip / NOISE_UNITS)
    expected = (clipped_gradients.sum(axis=0) + noise) / EXAMPLES
    assert np.linalg.norm(private.velocity() - expected) / np.linalg.norm(expected) < 1e-5 + MARGIN
    np.testing.assert_allclose(norm, [np.linalg.norm(expected)], rtol=3e-3)
    # The margin of the norm is the only difference from the textbook form.
    units = gradient_contributions(gradients, clip, SIGMA).sum(axis=0) + gradient_noise(KEYS, private.size)
    expected = units * (SIGMA * clip / NOISE_UNITS / EXAMPLES)
    assert np.linalg.norm(private.velocity() - expected) / np.linalg.norm(expected) < 1e-5


def test_micro_batches_make_the_same_totals(tiny):
    whole, pieces = (Private(tiny, effective_batch=4, **kind) for kind in ({}, {"micro_batch": 1}))
    in_parts, expected = (each(each.batch, 0.5)[0].numpy().astype(np.int64) for each in (pieces, whole))
    # A product of other shapes may round otherwise in float32.
    assert np.linalg.norm(in_parts - expected) < 1e-6 * np.linalg.norm(expected)


def test_only_the_last_call_of_a_step_adds_noise_and_moves_b(tiny):
    private = Private(tiny, optimizer="adam")
    first, _ = private(private.batch, 0.5, last=0.0)
    state = private.step.state.optimized.numpy()
    np.testing.assert_array_equal(state[: private.size], private.flat)
    assert not state[private.size :].any()  # moments too
    both, _ = private(private.batch, 0.5, carried=first)
    noise = both.numpy().astype(np.int64) - 2 * first.numpy()
    assert np.abs(noise - gradient_noise(KEYS, private.size)).max() <= 1
    assert not np.array_equal(private.step.state.current().numpy(), private.flat)
    assert private.step.state.part(1).any()


def test_a_gradient_that_is_no_number_adds_no_more_than_any_other():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((6, 700)).astype(np.float32)
    rows[0, 3], rows[1, :5], rows[2] = np.nan, np.inf, 1e38
    rows[3], rows[4] = 1e-30, -np.inf
    inputs = StepInputs(clip=one(1e-3), sigma=one(SIGMA), last=one(0.0), keys=torch.from_numpy(KEYS))
    for index in range(6):
        part = torch.from_numpy(rows[[index]])
        units = clipped_sum((part[:, :300], part[:, 300:]), inputs).numpy().astype(np.int64)
        assert int(units @ units) <= (NOISE_UNITS / SIGMA) ** 2
        expected = gradient_contributions(rows[[index]], 1e-3, SIGMA)[0]
        assert np.abs(units - expected).max() <= 1


@settings(max_examples=30, deadline=None)
@given(
    width=st.sampled_from([1, 255, BRANCHES, BRANCHES + 1, 70_000]),
    spread=st.floats(0, 8),
    sigma=st.floats(0.3125, 64, width=32),
    seed=st.integers(0, 2**32),
)
def test_a_wide_gradient_keeps_the_bound(width, spread, sigma, seed):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((2, width)) * 10.0 ** rng.uniform(-spread, spread, (2, width))).astype(np.float32)
    inputs = StepInputs(clip=one(0.01), sigma=one(sigma), last=one(0.0), keys=torch.from_numpy(KEYS))
    for index in range(2):
        units = clipped_sum((torch.from_numpy(rows[[index]]),), inputs).numpy().astype(np.int64)
        assert int(units @ units) <= (NOISE_UNITS / np.float32(sigma)) ** 2
    equal = torch.ones(1, width)  # of equal terms a float32 sum in one line would lose the most
    units = clipped_sum((equal,), inputs).numpy().astype(np.int64)
    assert int(units @ units) <= (NOISE_UNITS / np.float32(sigma)) ** 2


def test_the_noise_is_gaussian_of_the_stated_size():
    size = 200_000
    inputs = StepInputs(clip=one(1.0), sigma=one(1.0), last=one(1.0), keys=torch.from_numpy(KEYS))
    noise = noise_units(inputs, size).numpy().astype(np.float64)
    assert np.abs(noise - gradient_noise(KEYS, size)).max() <= 1
    z = noise / NOISE_UNITS
    error = 5 / np.sqrt(size)
    assert abs(z.mean()) < error
    assert abs(z.var() - 1) < np.sqrt(2) * error
    assert abs((z**4).mean() - 3) < np.sqrt(96) * error
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < error
    assert np.abs(z).max() < 7
    changed_keys = KEYS.copy()
    changed_keys[3, 1] ^= 1  # any key decides
    other = gradient_noise(changed_keys, size) / NOISE_UNITS
    assert np.corrcoef(z, other)[0, 1] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_private_directional_step_clips_the_projections(tiny, micro_batch):
    queries, lr = 5, 0.1
    changes = {"micro_batch": micro_batch} if micro_batch else {}
    private = Private(tiny, estimator="directional", optimizer="sgd", queries=queries, **changes)
    gradients = example_gradients(tiny, private.recipe, private.flat, private.batch)
    seeds = query_seeds(1, 0, queries)
    z = np.stack([direction("rademacher", (int(a), int(b)), private.size) for a, b in seeds])
    projections = gradients @ z.T  # (E, q)
    norms = np.linalg.norm(projections, axis=1)
    clip = float(np.median(norms))
    noise = np.array([500, -70, 3, 0, 9], np.float32)
    private.step.state.assign(torch.from_numpy(private.flat))
    secret = one(clip), torch.from_numpy(noise)
    with torch.no_grad():
        outputs = private.step(
            *batch_inputs(private.recipe, private.batch), torch.from_numpy(seeds), one(lr), one(0.0), *secret
        )
    totals, coefficients = (each.numpy() for each in outputs)
    clipped = (projections * np.minimum(1, clip / norms)[:, None]).sum(axis=0)
    np.testing.assert_allclose(totals - noise, clipped * UNITS / clip, atol=2 + EXAMPLES)
    np.testing.assert_allclose(coefficients, totals * (clip / UNITS) / EXAMPLES * lr / queries, rtol=1e-6)
    expected = private.flat - (coefficients[:, None] * z).sum(axis=0)
    np.testing.assert_allclose(private.step.state.current().numpy(), expected, atol=1e-6)
