"""The private step's sensitivity, measured on compiled programs: what one example can change of what is released."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.compiler.methods.private_gradient import example_means, noised_sums
from shared.privacy import NOISE_KEYS, NOISE_UNITS, UNITS, coefficients_of, contributions
from shared.recipe import TARGETS
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference

CLIP, LR, EPS = 0.2, 0.05, 0.02
QUERIES, EXAMPLES = 3, 3
SIGMA = 0.8  # of exact gradients
CASES = {
    "full": {"loss": "full", "noise": "gaussian"},
    "candidates": {"loss": "candidates", "layers": "last:1"},  # has prefix and suffix
    "int8": {"loss": "candidates", "precision": "int8"},
    "torch": {"loss": "candidates", "layers": "last:1", "backend": "torch"},
}
EXACT = {"estimator": "gradient", "queries": 1}
GRADIENT_CASES = {
    "gradient int8": {**EXACT, "loss": "full", "precision": "int8"},
    "gradient torch": {**EXACT, "loss": "candidates", "backend": "torch"},
    "directional": {"loss": "candidates", "estimator": "directional", "queries": 5},
    "loop": {"loss": "candidates", "estimator": "directional", "queries": 512, "rank": 32, "targets": TARGETS},
}


FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=CASES)
def program(request, programs, tiny):
    case = (CASES | GRADIENT_CASES)[request.param]
    return programs(tiny, **{"queries": QUERIES, "effective_batch": EXAMPLES, "privacy": "clipped"} | case)


def totals(program, batch, *, clip=CLIP, seed=1):
    """The totals before noise, of B as it is; lr 0 leaves it there."""
    recipe = program.manifest.recipe
    if recipe.estimator == "gradient":
        keys, carried = np.zeros((NOISE_KEYS, 2), np.int32), np.zeros(program.manifest.size, np.int32)
        return program.step(batch, 0.1, np.inf, 0.0, clip, SIGMA, 0.0, keys, carried)[0].astype(np.int64)
    rest = query_seeds(seed, 0, recipe.queries), 0.0, EPS, clip, np.zeros(recipe.queries, np.float32)
    sums, _ = program.step(batch, *rest)
    if "suffix" in program.manifest.methods:
        again, _ = program.suffix(program("prefix", batch.tokens)[0], batch, *rest)
        assert np.array_equal(sums, again)
    assert np.array_equal(sums, np.rint(sums))
    return sums.astype(np.int64)


@pytest.mark.slow
@FEW
@given(
    seed=st.integers(0, 2**32), size=st.sampled_from([0.0, 0.1, 10.0]), clip=st.sampled_from([1e-6, 0.01, 0.2, 50.0])
)
@pytest.mark.parametrize("program", [*CASES, *GRADIENT_CASES], indirect=True)
def test_the_totals_are_sums_of_what_each_example_adds_by_itself(program, seed, size, clip):
    before = program.load_some_b(size, seed)
    bound = NOISE_UNITS / SIGMA if program.manifest.recipe.estimator == "gradient" else UNITS
    batch = reference.random_batch(np.random.default_rng(seed), program.manifest.recipe, 96)
    alone = [totals(program, reference.select_rows(batch, [row, None, None]), clip=clip) for row in range(EXAMPLES)]
    assert all(int(units @ units) <= bound**2 for units in alone)
    # Exactly: whoever else is in the step, and in which row, changes nothing of what an example adds. So whether it
    # is there changes the sums by its own contribution, whose norm is at most C.
    for rows in ([0, 1, 2], [2, 0, 1], [None, 1, 2], [1, None, 0], [2, 2, None]):
        expected = sum(alone[row] for row in rows if row is not None)
        np.testing.assert_array_equal(totals(program, reference.select_rows(batch, rows), clip=clip), expected)
    assert not totals(program, reference.select_rows(batch, [None] * EXAMPLES), clip=clip).any()
    np.testing.assert_array_equal(program("adapter")[0], before)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30, -1e30])
def test_what_is_no_number_adds_no_more_than_any_other_example(program, bad):
    rng = np.random.default_rng(2)
    flat = rng.standard_normal(program.manifest.size).astype(np.float32)
    flat[::3] = bad
    program("load", flat)
    batch = reference.random_batch(rng, program.manifest.recipe, 96)
    alone = [totals(program, reference.select_rows(batch, [None, row, None])) for row in range(EXAMPLES)]
    assert all(int(units @ units) <= UNITS**2 for units in alone)
    assert np.array_equal(totals(program, reference.select_rows(batch, [None] * EXAMPLES)), np.zeros(QUERIES, np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["full", "candidates", "torch"], indirect=True)
def test_the_totals_are_those_of_the_reference(program, tiny):
    recipe, manifest = program.manifest.recipe, program.manifest
    rng, flat = np.random.default_rng(9), program.load_some_b(0.3)
    batch = reference.random_batch(rng, recipe, 96)
    seeds = query_seeds(1, 0, QUERIES)
    differences = np.zeros((EXAMPLES, QUERIES), np.float32)
    for row in range(EXAMPLES):
        one = reference.select_rows(batch, [row])
        losses, _, _ = reference.step(tiny.model, recipe, manifest.shape, flat, one, seeds, LR, EPS)
        differences[row] = losses[:QUERIES] - losses[QUERIES:]
    norms = np.linalg.norm(differences, axis=1)
    clip = float(np.median(norms))  # one example is clipped, one is not
    assert norms.min() < clip < norms.max()
    expected = contributions(differences, clip).sum(axis=0)
    np.testing.assert_allclose(totals(program, batch, clip=clip), expected, atol=UNITS * 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["full", "candidates", "torch"], indirect=True)
def test_noise_is_added_before_b_moves_and_b_is_a_function_of_the_noised_totals(program):
    recipe = program.manifest.recipe
    before = program.load_some_b()
    batch = reference.random_batch(np.random.default_rng(4), recipe, 96)
    plain = totals(program, batch)
    noise = np.array([12345, -40000, 7], np.float32)
    seeds = query_seeds(1, 0, QUERIES)
    noised, coefficients = program.step(batch, seeds, LR, EPS, CLIP, noise)
    assert np.array_equal(noised, plain + noise)
    np.testing.assert_allclose(coefficients, coefficients_of(noised, CLIP, LR, EPS, EXAMPLES), rtol=1e-6)
    (after,) = program("adapter")
    expected = before
    for coefficient, seed in zip(coefficients, seeds, strict=True):
        expected = expected - coefficient * direction(recipe.noise, (int(seed[0]), int(seed[1])), len(before))
    np.testing.assert_allclose(after, expected, atol=1e-6 * np.abs(expected).max())
    program("load", before)
    program("replay", seeds, coefficients)
    assert np.array_equal(program("adapter")[0], after)


@settings(max_examples=300, deadline=None)
@given(
    differences=st.lists(st.lists(st.floats(width=32, allow_nan=True), min_size=2, max_size=2), min_size=1, max_size=6),
    clip=st.floats(2.0**-20, 2.0**9, width=32),
)
def test_the_graph_clips_any_float_as_the_reference_does(differences, clip):
    values = np.array(differences, np.float32)  # (E, q)
    by_query = torch.from_numpy(np.ascontiguousarray(values.T))  # (q, E)
    sums = noised_sums(by_query, torch.tensor([clip], dtype=torch.float32), torch.zeros(2)).numpy()
    units = contributions(values, clip)
    assert (np.square(units).sum(axis=1) <= UNITS**2).all()
    # sqrt and the sum of two squares may differ by a last bit, which moves an example by one unit at most.
    np.testing.assert_allclose(sums, units.sum(axis=0), atol=len(values))


def test_a_wide_vector_of_differences_keeps_the_bound_to_the_unit():
    rng = np.random.default_rng(0)
    for queries in (1, 2, 7, 64):
        differences = (rng.standard_normal((5000, queries)) * 10.0 ** rng.uniform(-8, 8, (5000, 1))).astype(np.float32)
        by_query = torch.from_numpy(np.ascontiguousarray(differences.T))
        for row in range(0, 5000, 100):
            units = noised_sums(by_query[:, row : row + 1], torch.tensor([0.3]), torch.zeros(queries)).numpy()
            assert int(np.square(units.astype(np.int64)).sum()) <= UNITS**2
        assert int(np.square(contributions(differences, 0.3)).sum(axis=1).max()) <= UNITS**2


def test_a_shorter_answer_counts_by_its_own_tokens():
    per_path = torch.tensor([[1.0, 3.0, 5.0, torch.inf]])  # two examples of two tokens
    means = example_means(per_path, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert means[0, 0] == 2.0
    assert torch.isnan(means[0, 1])  # which counts as zero, as any row that is no number
