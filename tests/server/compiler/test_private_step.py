"""The private step's sensitivity, measured on compiled programs: what one example can change of what is released."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_agent.runtimes.torch_export import TorchRuntime
from server.compiler.methods.clipping import example_means, noised_totals
from shared.privacy import UNITS, coefficients_of, contributions
from shared.program import ProgramManifest
from shared.zo.noise import direction, query_seeds
from tests.programs import shared_store
from tests.server.compiler import reference
from tests.server.compiler.conftest import Program, TinyBase

CLIP, LR, EPS = 0.2, 0.05, 0.02
QUERIES, EXAMPLES = 3, 3
CASES = {
    "full": {"loss": "full", "noise": "gaussian"},
    "candidates": {"loss": "candidates", "layers": "last:1"},  # has prefix and suffix
    "portable": {"loss": "full", "backend": "portable", "targets": ("q_proj", "down_proj")},
    "int8": {"loss": "candidates", "precision": "int8"},
    "torch": {"loss": "candidates", "layers": "last:1", "backend": "torch"},
}


def cases(names: Iterable[str] = CASES) -> list[Any]:
    """Test parameters of CASES, which compile a program each."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TorchProgram(TorchRuntime):
    """A program for PyTorch, called as the others are: by the runtime that devices run it with, on the CPU."""

    def __init__(self, directory: Path, manifest: ProgramManifest) -> None:
        files = (directory / manifest.file(role).name for role in ("program", "weights"))
        super().__init__(manifest, *files, device=torch.device("cpu"))
        self.manifest = manifest

    def __call__(self, method: str, *inputs: np.ndarray) -> list[np.ndarray]:
        return self._call(method, inputs)


AnyProgram = Program | TorchProgram


class Private:
    """Private programs of the tiny base, each compiled once a session."""

    def __init__(self, base: TinyBase, directory: Path) -> None:
        self.base, self._directory, self._compiled = base, directory, {}

    def __call__(self, case: str) -> AnyProgram:
        if case not in self._compiled:
            recipe = self.base.recipe(queries=QUERIES, effective_batch=EXAMPLES, privacy="clipped", **CASES[case])
            directory = self._directory / case
            manifest = shared_store().put(recipe, self.base.directory, directory)
            kind = TorchProgram if recipe.backend == "torch" else Program
            self._compiled[case] = kind(directory, manifest)
        return self._compiled[case]


@pytest.fixture(scope="session")
def private(tiny: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Private:
    return Private(tiny, tmp_path_factory.mktemp("private"))


def inputs(program: AnyProgram, batch: reference.Batch) -> list[np.ndarray]:
    full = program.manifest.recipe.loss == "full"
    labels = (batch.choices[..., 0],) if full else (batch.choices, batch.choice_mask)
    return [batch.positions, *labels, batch.mask]


def totals(program: AnyProgram, batch: reference.Batch, *, clip: float = CLIP, seed: int = 1) -> np.ndarray:
    """The totals before noise, of B as it is; lr 0 leaves it there."""
    seeds = query_seeds(seed, 0, QUERIES)
    scalars = [np.array([value], np.float32) for value in (0.0, EPS, clip)]
    secret = (*scalars, np.zeros(QUERIES, np.float32))
    found, _ = program("step", batch.tokens, *inputs(program, batch), seeds, *secret)
    if "suffix" in program.manifest.methods:
        (hidden,) = program("prefix", batch.tokens)
        again, _ = program("suffix", hidden, *inputs(program, batch), seeds, *secret)
        assert np.array_equal(found, again)
    assert np.array_equal(found, np.rint(found))
    return found.astype(np.int64)


def chosen(batch: reference.Batch, rows: list[int | None]) -> reference.Batch:
    """A batch of other rows of the batch; None: an absent example, as `pack_step` leaves one."""
    taken = [0 if row is None else row for row in rows]
    made = reference.Batch(*(getattr(batch, name)[taken].copy() for name in reference.Batch.__dataclass_fields__))
    for at, row in enumerate(rows):
        if row is None:
            made.tokens[at], made.positions[at], made.choices[at], made.mask[at] = 0, 0, 0, 0
            made.choice_mask[at] = np.eye(made.choice_mask.shape[2], dtype=np.float32)[0]
    return made


def load(program: AnyProgram, seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    program("load", (size * rng.standard_normal(program.manifest.size)).astype(np.float32))


@pytest.mark.parametrize("case", cases())
@FEW
@given(
    seed=st.integers(0, 2**32), size=st.sampled_from([0.0, 0.1, 10.0]), clip=st.sampled_from([1e-6, 0.01, 0.2, 50.0])
)
def test_the_totals_are_sums_of_what_each_example_adds_by_itself(
    private: Private, case: str, seed: int, size: float, clip: float
) -> None:
    program = private(case)
    load(program, seed, size)
    batch = reference.random_batch(np.random.default_rng(seed), program.manifest.recipe, 96)
    alone = [totals(program, chosen(batch, [row, None, None]), clip=clip) for row in range(EXAMPLES)]
    for units in alone:
        assert int(units @ units) <= UNITS**2
    # Exactly: whoever else is in the step, and in which row, changes nothing of what an example adds. So whether it
    # is there changes the sums by its own contribution, whose norm is at most C.
    assert np.array_equal(totals(program, batch, clip=clip), sum(alone))
    for rows in ([2, 0, 1], [None, 1, 2], [1, None, 0], [2, 2, None]):
        expected = sum(alone[row] for row in rows if row is not None)
        assert np.array_equal(totals(program, chosen(batch, rows), clip=clip), expected)
    assert np.array_equal(totals(program, chosen(batch, [None] * EXAMPLES), clip=clip), np.zeros(QUERIES, np.int64))


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30, -1e30])
def test_what_is_no_number_adds_no_more_than_any_other_example(private: Private, case: str, bad: float) -> None:
    program = private(case)
    rng = np.random.default_rng(2)
    flat = rng.standard_normal(program.manifest.size).astype(np.float32)
    flat[::3] = bad
    program("load", flat)
    batch = reference.random_batch(rng, program.manifest.recipe, 96)
    alone = [totals(program, chosen(batch, [None, row, None])) for row in range(EXAMPLES)]
    assert all(int(units @ units) <= UNITS**2 for units in alone)
    assert np.array_equal(totals(program, chosen(batch, [None] * EXAMPLES)), np.zeros(QUERIES, np.int64))


@pytest.mark.parametrize("case", cases(["full", "candidates", "portable", "torch"]))
def test_the_totals_are_those_of_the_reference(private: Private, case: str) -> None:
    program = private(case)
    recipe, manifest = program.manifest.recipe, program.manifest
    rng = np.random.default_rng(9)
    flat = (0.3 * rng.standard_normal(manifest.size)).astype(np.float32)
    program("load", flat)
    batch = reference.random_batch(rng, recipe, 96)
    seeds = query_seeds(1, 0, QUERIES)
    differences = np.zeros((EXAMPLES, QUERIES), np.float32)
    for row in range(EXAMPLES):
        one = reference.Batch(*(getattr(batch, name)[[row]] for name in reference.Batch.__dataclass_fields__))
        losses, _, _ = reference.step(private.base.model, recipe, manifest.shape, flat, one, seeds, LR, EPS)
        differences[row] = losses[:QUERIES] - losses[QUERIES:]
    norms = np.linalg.norm(differences, axis=1)
    clip = float(np.median(norms))  # one example is clipped, one is not
    assert norms.min() < clip < norms.max()
    expected = contributions(differences, clip).sum(axis=0)
    np.testing.assert_allclose(totals(program, batch, clip=clip), expected, atol=UNITS * 5e-3)


@pytest.mark.parametrize("case", cases(["full", "candidates", "torch"]))
def test_noise_is_added_before_b_moves_and_b_is_a_function_of_the_noised_totals(private: Private, case: str) -> None:
    program = private(case)
    recipe = program.manifest.recipe
    load(program, 3, 0.1)
    (before,) = program("adapter")
    batch = reference.random_batch(np.random.default_rng(4), recipe, 96)
    plain = totals(program, batch)
    noise = np.array([12345, -40000, 7], np.float32)
    seeds = query_seeds(1, 0, QUERIES)
    scalars = [np.array([value], np.float32) for value in (LR, EPS, CLIP)]
    noised, coefficients = program("step", batch.tokens, *inputs(program, batch), seeds, *scalars, noise)
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
def test_the_graph_clips_any_float_as_the_reference_does(differences: list[list[float]], clip: float) -> None:
    values = np.array(differences, np.float32)  # (E, q)
    per_path = torch.from_numpy(np.concatenate((values.T, np.zeros_like(values.T))))  # (2q, E), T = 1
    means = example_means(per_path, torch.ones(len(values), 1))
    found = noised_totals(means, torch.tensor([clip], dtype=torch.float32), torch.zeros(2)).numpy()
    units = contributions(values, clip)
    assert (np.square(units).sum(axis=1) <= UNITS**2).all()
    # sqrt and the sum of two squares may differ by a last bit, which moves an example by one unit at most.
    np.testing.assert_allclose(found, units.sum(axis=0), atol=len(values))


def test_a_wide_vector_of_differences_keeps_the_bound_to_the_unit() -> None:
    rng = np.random.default_rng(0)
    for queries in (1, 2, 7, 64):
        differences = (rng.standard_normal((5000, queries)) * 10.0 ** rng.uniform(-8, 8, (5000, 1))).astype(np.float32)
        per_path = torch.from_numpy(np.concatenate((differences.T, np.zeros_like(differences.T))))
        for row in range(0, 5000, 100):
            units = noised_totals(per_path[:, row : row + 1], torch.tensor([0.3]), torch.zeros(queries)).numpy()
            assert int(np.square(units.astype(np.int64)).sum()) <= UNITS**2
        assert int(np.square(contributions(differences, 0.3)).sum(axis=1).max()) <= UNITS**2


def test_a_shorter_answer_counts_by_its_own_tokens() -> None:
    per_path = torch.tensor([[1.0, 3.0, 5.0, torch.inf]])  # two examples of two tokens
    means = example_means(per_path, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert means[0, 0] == 2.0
    assert torch.isnan(means[0, 1])  # which counts as zero, as any row that is no number


def test_an_estimator_without_a_bound_is_refused(tiny: TinyBase) -> None:
    with pytest.raises(ValueError, match="requires estimator 'gradient', 'directional' or 'replay'"):
        tiny.recipe(privacy="clipped", estimator="stored")
    with pytest.raises(ValueError, match="one of the backends xnnpack, portable, torch"):
        tiny.recipe(privacy="clipped", backend="vulkan")
