"""Estimator `stored` against the paper's Algorithm 2 written out in NumPy, for any q, and the runtime's own noise."""

import numpy as np
import pytest

from shared.program import METHODS
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference
from tests.server.compiler.conftest import VOCABULARY, token_batch

SCHEDULE = [(0.05, 0.02), (0.02, 0.02), (0.05, 0.05), (0.08, 0.01)]  # (lr, eps) of each step
SETTINGS = {
    "rademacher": {"queries": 3},
    "gaussian": {"queries": 2, "loss": "candidates", "layers": "last:1"},
    "randn": {"queries": 1, "targets": ("q_proj", "v_proj", "o_proj")},
}
NOISES = ["rademacher", "gaussian"]  # the second one has prefix and suffix

pytestmark = pytest.mark.slow


class Algorithm2:
    """The paper's Mobile MP-LoRA module: line by line in float64, for q queries. Its line numbers are beside."""

    def __init__(self, b, queries):
        self.copies = np.tile(b.astype(np.float64), (2, queries, 1))  # B[0] and B[1] of each query, (2, q, D)
        self.eta, self.eps, self.g = 0.0, 1.0, np.zeros(queries)

    def _restored(self):
        diff = (self.copies[0] - self.copies[1]) / 2  # 2
        update = self.eta / len(self.g) * sum(g * d / self.eps for g, d in zip(self.g, diff, strict=True))  # 3
        return diff, update

    def perturb(self, z, eps):
        """z: (q, D)."""
        diff, update = self._restored()
        self.copies = np.stack(
            (self.copies[0] - diff - update + eps * z, self.copies[1] + diff - update - eps * z)  # 4 to 6
        )

    def learn(self, losses, eta, eps):
        """losses: (2q,) at the copies."""
        queries = len(self.g)
        self.eta, self.eps, self.g = eta, eps, (losses[:queries] - losses[queries:]) / (2 * eps)

    @property
    def b(self):
        """B (D,) as the next call will restore and update it."""
        diff, update = self._restored()
        return self.copies[0, 0] - diff[0] - update


@pytest.fixture
def stored_programs(tiny, programs):
    """Programs of estimator `stored` by noise, B zero and nothing pending."""
    return lambda noise: (programs(tiny, estimator="stored", noise=noise, **SETTINGS[noise]), tiny)


def train(program, seed=7):
    """One step of each in SCHEDULE; returns seeds, coefficients and eps of each."""
    rng, queries = np.random.default_rng(seed), program.manifest.recipe.queries
    ledger = []
    for number, (lr, eps) in enumerate(SCHEDULE):
        batch = reference.random_batch(rng, program.manifest.recipe, VOCABULARY)
        seeds = query_seeds(123, number, queries)
        ledger.append((seeds, program.step(batch, seeds, lr, eps)[1], eps))
    return ledger


@pytest.mark.parametrize("noise", NOISES)
def test_steps_are_the_papers_algorithm_2(stored_programs, noise):
    program, base = stored_programs(noise)
    recipe, shape, size = program.manifest.recipe, program.manifest.shape, program.manifest.size
    start = program.load_some_b()
    paper, rng, queries = Algorithm2(start, recipe.queries), np.random.default_rng(7), recipe.queries
    for number, (lr, eps) in enumerate(SCHEDULE):
        batch = reference.random_batch(rng, recipe, VOCABULARY)
        seeds = query_seeds(123, number, queries)
        losses, coefficients = program.step(batch, seeds, lr, eps)
        paper.perturb(np.stack([direction(noise, (int(a), int(b)), size) for a, b in seeds]), eps)
        copies = paper.copies.reshape(2 * queries, size).astype(np.float32)
        expected = [reference.loss(base.model, recipe, shape, copy, batch) for copy in copies]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        paper.learn(losses.astype(np.float64), lr, eps)
        np.testing.assert_allclose(coefficients, lr / queries * paper.g, rtol=1e-5)
        assert np.abs(paper.b - start).max() > 1e-3  # there is an update to see
        if number % 2:
            program("flush")
        np.testing.assert_allclose(program("adapter")[0], paper.b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("noise", NOISES)
def test_replay_repeats_the_stored_copies_bit_for_bit(stored_programs, noise):
    program, _ = stored_programs(noise)
    rng, recipe = np.random.default_rng(11), program.manifest.recipe
    ledger = train(program)
    trained_b = program("adapter")[0]
    batch, seeds = reference.random_batch(rng, recipe, VOCABULARY), query_seeds(1, 0, recipe.queries)
    following = program.step(batch, seeds, 0.05, 0.02)[0]
    program("load", np.zeros_like(trained_b))
    for recorded_seeds, coefficients, eps in ledger:
        program("replay", recorded_seeds, coefficients, np.array([eps], np.float32))
    np.testing.assert_array_equal(program("adapter")[0], trained_b)
    np.testing.assert_array_equal(program.step(batch, seeds, 0.05, 0.02)[0], following)


@pytest.mark.parametrize("noise", NOISES)
def test_score_sees_the_pending_update(stored_programs, noise):
    program, _ = stored_programs(noise)
    recipe, rng = program.manifest.recipe, np.random.default_rng(5)
    rows, t = recipe.score_rows, recipe.answer_length
    tokens, choices = token_batch(rng, rows, recipe.sequence_length), token_batch(rng, rows, t, recipe.choices)
    positions = rng.integers(0, recipe.sequence_length, (rows, t))
    untrained = program("score", tokens, positions, choices)[0]
    train(program)
    pending = program("score", tokens, positions, choices)[0]
    b = program("adapter")[0]
    program("load", b)
    np.testing.assert_array_equal(program("score", tokens, positions, choices)[0], pending)
    assert np.abs(pending - untrained).max() > 1e-3


def test_the_runtimes_own_noise_moves_b_along_normal_directions(stored_programs):
    """B moves by -c z, so that z is seen: its moments are a normal variable's, and steps have nothing in common."""
    program, _ = stored_programs("randn")
    recipe, rng, steps = program.manifest.recipe, np.random.default_rng(6), 12
    samples = []
    while len(samples) < steps:
        program("load", np.zeros(program.manifest.size, np.float32))
        batch = reference.random_batch(rng, recipe, VOCABULARY)
        (coefficient,) = program.step(batch, query_seeds(1, 0, 1), 0.05, 0.02)[1]
        if coefficient == 0:  # both losses are the same float: such a step moves nothing
            continue
        samples.append(-program("adapter")[0] / coefficient)
    z = np.stack(samples).astype(np.float64)
    count = z.size
    assert abs(z.mean()) < 5 / np.sqrt(count)  # five standard errors each
    assert (z**2).mean() == pytest.approx(1, abs=5 * np.sqrt(2 / count))
    assert (z**4).mean() == pytest.approx(3, abs=5 * np.sqrt(96 / count))
    common = np.corrcoef(z) - np.eye(steps)
    assert np.abs(common).max() < 5 / np.sqrt(program.manifest.size)


def test_the_runtimes_own_noise_cannot_be_replayed(stored_programs):
    program, _ = stored_programs("randn")
    assert program.manifest.methods == (*(name for name in METHODS if name != "replay"), "flush")
