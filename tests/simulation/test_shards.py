"""Shards are disjoint, as skewed as requested, and reproducible."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.settings import DataSettings
from simulation.shards import partition

POOL = 4000
LABELS = [index % 2 for index in range(POOL)]
SOURCES = [index // 2 % 2 for index in range(POOL)]


def shards(devices=100, seed=0, **settings):
    return partition(DataSettings(**settings), devices, seed, LABELS, SOURCES)


@given(
    seed=st.integers(0, 2**40),
    partition=st.sampled_from(["iid", "dirichlet", "source"]),
    alpha=st.floats(0.01, 100),
    skew=st.floats(0, 1.5),
    devices=st.integers(1, 120),
)
def test_no_example_is_in_two_places(seed, partition, alpha, skew, devices):
    shard_list = shards(devices, seed, partition=partition, alpha=alpha, skew=skew)
    indices = [index for shard in shard_list for index in shard.train + shard.held_out]
    assert len(shard_list) == devices
    assert len(set(indices)) == len(indices)
    assert all(len(shard.train) >= 2 and shard.held_out for shard in shard_list)


def test_the_same_seed_makes_the_same_shards():
    assert shards() == shards() != shards(seed=1)


def majority(shard):
    counts = Counter(LABELS[index] for index in shard.train)
    return max(counts.values()) / sum(counts.values())


def test_a_small_alpha_gives_devices_one_label_and_a_large_one_both():
    concentrated, uniform = (np.mean([majority(shard) for shard in shards(alpha=alpha)]) for alpha in (0.05, 1000))
    # A share p of Beta(a, a) has a mean of max(p, 1 - p) that goes to 1 for a small a, and to 1/2 for a large one.
    rng = np.random.default_rng(0)
    expected = np.mean(np.maximum(p := rng.beta(0.05, 0.05, 20_000), 1 - p))
    assert concentrated == pytest.approx(expected, abs=0.06)
    assert uniform < 0.65


def test_by_source_a_device_has_one_source():
    for device, shard in enumerate(shards(partition="source")):
        assert {SOURCES[index] for index in shard.train + shard.held_out} == {device % 2}


def test_a_pool_too_small_is_refused():
    with pytest.raises(ValueError, match="too few for 2000 devices"):
        shards(devices=2000)
