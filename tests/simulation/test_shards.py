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


def test_the_minimum_shard_size_is_taken_from_the_largest_shards():
    shard_list = shards(120, 20, skew=1.5)
    assert sum(len(shard.train) + len(shard.held_out) for shard in shard_list) == POOL
    assert min(len(shard.train) for shard in shard_list) == 2


def test_devices_of_an_exhausted_source_take_other_examples():
    sources = [index % 10 == 0 for index in range(POOL)]
    shard_list = partition(DataSettings(partition="source", per_device=360, held_out=40), 10, 0, LABELS, sources)
    drawn_sources = [sources[index] for shard in shard_list[3::2] for index in shard.train + shard.held_out]
    assert all(len(shard.train) + len(shard.held_out) == 400 for shard in shard_list)
    assert drawn_sources == [False] * 4 * 400


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


def test_iid_shards_mix_labels_and_sources():
    kinds = [Counter((LABELS[index], SOURCES[index]) for index in shard.train) for shard in shards(partition="iid")]
    assert np.mean([len(kind) for kind in kinds]) > 3.9


def test_skew_varies_the_shard_sizes():
    def sizes(skew):
        return [len(shard.train) + len(shard.held_out) for shard in shards(skew=skew, per_device=20)]

    assert len(set(sizes(0))) == 1
    assert np.std(np.log(sizes(1.0))) == pytest.approx(1.0, abs=0.25)


def test_a_pool_too_small_is_refused():
    with pytest.raises(ValueError, match="too few for 2000 devices"):
        shards(devices=2000)
