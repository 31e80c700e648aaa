"""One device in five is malicious: which aggregators survive which attack.

Honest devices' updates scatter around a common signal, like zeroth-order steps on different data: each is mostly noise.
An aggregator survives an attack if its result keeps at least 0.6 of its cosine with the signal without the attack, and
at least half of the signal's length.
"""

import numpy as np
import pytest

from shared.federation.aggregation import Weighting, combine
from shared.federation.cohort import AggregatorSettings
from shared.federation.sources import MemorySource
from shared.federation.update import Update

HONEST, MALICIOUS, SIZE = 40, 10, 2000
NOISE = 3.0  # of one update, against the signal's 1


def signal():
    return np.random.default_rng(1).normal(size=SIZE)


def honest():
    return (signal() + NOISE * np.random.default_rng(2).normal(size=(HONEST, SIZE))).astype(np.float32)


def sign_flip(honest_updates):
    """Negated honest updates, scaled by ten."""
    return -10 * honest_updates[:MALICIOUS]


def huge(honest_updates):
    """Huge finite numbers."""
    return np.full((MALICIOUS, SIZE), 1e30)


def noise(honest_updates):
    """Random numbers, thirty times as large as an honest update."""
    return 30 * NOISE * np.random.default_rng(3).normal(size=(MALICIOUS, SIZE))


def collusion(honest_updates):
    """All send the negated honest mean, with the norm of an honest update."""
    target = -honest_updates.mean(axis=0)
    length = np.median(np.linalg.norm(honest_updates, axis=1))
    return np.tile(target * length / np.linalg.norm(target), (MALICIOUS, 1))


def a_little(honest_updates):
    """All send an update slightly off the honest mean in every coordinate, closer to it than honest updates are.

    source: Baruch et al., A Little Is Enough, NeurIPS 2019.
    """
    mean, spread = honest_updates.mean(axis=0), honest_updates.std(axis=0)
    return np.tile(mean - 0.6 * spread * np.sign(mean), (MALICIOUS, 1))


AGGREGATORS = {
    "mean": AggregatorSettings(),
    "clipped mean": AggregatorSettings(clip_norm=NOISE * SIZE**0.5),
    "median": AggregatorSettings(name="median"),
    "trimmed mean": AggregatorSettings(name="trimmed_mean", trim_share=0.2),
    "krum": AggregatorSettings(name="krum", krum_f=MALICIOUS),
    "multi-krum": AggregatorSettings(name="multi_krum", krum_f=MALICIOUS),
}


def outcome(name, attack=None):
    """Returns (cosine with the signal, relative length along the signal) of an aggregator's result."""
    honest_updates = honest()
    rows = (
        honest_updates
        if attack is None
        else np.concatenate([honest_updates, attack(honest_updates)]).astype(np.float32)
    )
    order = np.random.default_rng(4).permutation(len(rows))
    source = MemorySource([Update(f"m{position:02}", rows[number]) for position, number in enumerate(order)])
    result = combine(source, AGGREGATORS[name], Weighting()).update.astype(np.float64)
    along, length = result @ signal(), np.linalg.norm(signal())
    return float(along / np.linalg.norm(result) / length), float(along / length**2)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_without_attacks_every_aggregator_follows_the_signal(name):
    """Krum selects a single update, which is mostly noise: cosine 1 / sqrt(1 + 3^2) = 0.32."""
    cosine, along = outcome(name)
    assert cosine == pytest.approx(0.32, abs=0.05) if name == "krum" else cosine > 0.85
    assert along == pytest.approx(1, abs=0.1)


# docs/federation.md shows this table; update it with any change.
SURVIVORS = {
    sign_flip: {"clipped mean", "median", "trimmed mean", "krum", "multi-krum"},
    huge: {"clipped mean", "median", "trimmed mean", "krum", "multi-krum"},
    noise: {"clipped mean", "median", "trimmed mean", "krum", "multi-krum"},
    collusion: {"krum", "multi-krum"},
    a_little: {"mean", "clipped mean", "trimmed mean", "multi-krum"},
}


@pytest.mark.parametrize("attack", SURVIVORS, ids=lambda attack: attack.__name__)
def test_each_aggregator_survives_its_documented_attacks(attack):
    survivors = set()
    for name in AGGREGATORS:
        (cosine, along), (clean, _) = outcome(name, attack), outcome(name)
        if cosine >= 0.6 * clean and along >= 0.5:
            survivors.add(name)
    assert survivors == SURVIVORS[attack]
