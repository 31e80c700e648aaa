"""The replay in blocks against `Trajectory.replay`, which follows the paper's update element by element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Conflict, NotReplayable
from shared.zo.replay import BLOCK_CALLS, CHUNK_KEYS
from shared.zo.replay import replay as fast_replay
from shared.zo.trajectory import Trajectory, TrajectoryHeader

BLOCK = 64 * BLOCK_CALLS


def trajectory(size, steps, queries, seed=2**53 - 1, noise="rademacher", scale=1.0, mu=None):
    rng = np.random.default_rng(seed % 1000)
    header = TrajectoryHeader(
        job_id="j", job_seed=seed, recipe_id="0" * 64, noise=noise, queries=queries, size=size, proximal=mu
    )
    run = Trajectory(header)
    for _ in range(steps):
        run.append_numbers(np.array([*(scale * rng.normal(size=queries)), *([rng.random()] if mu else [])], np.float32))
    return run


def start(size):
    return np.random.default_rng(1).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_every_size_to_the_bit(size):
    run = trajectory(size, 9, 4)
    assert fast_replay(run, start(size)).tobytes() == run.replay(start(size)).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 300),
    steps=st.integers(0, 12),
    queries=st.integers(1, CHUNK_KEYS + 3),
    seed=st.integers(0, 2**53 - 1),
    scale=st.sampled_from([0.0, 1e-42, 1e-3, 1.0, 1e30]),
    mu=st.none() | st.just(0.5),
    data=st.data(),
)
def test_every_run_to_the_bit_after_every_step(size, steps, queries, seed, scale, mu, data):
    run = trajectory(size, steps, queries, seed, scale=scale, mu=mu)
    last_step = data.draw(st.none() | st.integers(0, steps))
    assert fast_replay(run, start(size), last_step).tobytes() == run.replay(start(size), last_step).tobytes()


def test_replay_overflow_gives_nonfinite_values_without_a_warning():
    run = trajectory(64, 2, 1)
    run.coefficients[:] = [np.full(1, 3e38, np.float32)] * 2
    assert not np.isfinite(fast_replay(run, np.zeros(64, np.float32))).all()


@pytest.mark.parametrize("noise", ["gaussian", "operator", "randn"])
def test_replay_rejects_noise_that_depends_on_the_machine(noise):
    with pytest.raises(NotReplayable, match=noise):
        fast_replay(trajectory(64, 1, 1, noise=noise), np.zeros(64, np.float32))


def test_runs_with_exact_gradients_cannot_be_replayed():
    run = trajectory(8, 2, 1)
    run.header = run.header.model_copy(update={"exact": True})
    with pytest.raises(Conflict, match="train with estimator directional or replay"):
        run.replay(start(8))
