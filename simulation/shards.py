"""Whose data is whose: one pool of labelled examples cut into the shards of many devices, as unlike as is asked.

source: label proportions from a Dirichlet distribution, Hsu et al., "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification", 2019. Knows labels and sources, not texts; knows no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulation.draws import generator
from simulation.settings import DataSettings

I64 = NDArray[np.int64]
LEAST = 2  # examples that a device trains on


@dataclass(frozen=True)
class Shard:
    """A device's part of the pool, by index. held_out: what it measures on; never in `train`, its own or another's."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def cut(settings: DataSettings, devices: int, seed: int, labels: Sequence[int], sources: Sequence[int]) -> list[Shard]:
    """One shard for each device. labels, sources: of each example of the pool.

    No example is in two shards. Where the pool is too small for what is asked, all get less in proportion. Raises
    ValueError if there is too little for each to have LEAST examples and one to measure on.
    """
    wanted = _sizes(settings, devices, seed, len(labels))
    rng = generator(seed, "shards")
    groups = np.array(labels) + (max(labels) + 1) * np.array(sources)
    piles = {int(group): rng.permutation(np.flatnonzero(groups == group)).tolist() for group in np.unique(groups)}
    of_label = {group: group % (max(labels) + 1) for group in piles}
    of_source = {group: group // (max(labels) + 1) for group in piles}
    shards = []
    for device, size in enumerate(wanted):
        shares = _shares(settings, rng, piles, of_label, of_source, device)
        shards.append(_take(rng, piles, shares, int(size)))
    return [_split(shard, settings) for shard in shards]


def _sizes(settings: DataSettings, devices: int, seed: int, pool: int) -> I64:
    """Examples of each device, those that it measures on included."""
    rng = generator(seed, "sizes")
    whole = settings.per_device + min(settings.held_out, settings.per_device // 2)
    raw = whole * np.exp(settings.skew * rng.standard_normal(devices) - settings.skew**2 / 2)
    raw *= min(1.0, pool / raw.sum())
    if devices * (LEAST + 1) > pool:
        raise ValueError(f"{pool} examples are too few for {devices} devices; give more data, or fewer devices")
    sizes = np.maximum(raw.astype(np.int64), LEAST + 1)
    while sizes.sum() > pool:  # what the least have more than their share, the largest give
        sizes[sizes.argmax()] -= 1
    return sizes


def _shares(
    settings: DataSettings,
    rng: np.random.Generator,
    piles: dict[int, list[int]],
    of_label: dict[int, int],
    of_source: dict[int, int],
    device: int,
) -> dict[int, float]:
    """How much of each pile a device would take, in proportion."""
    left = {group: len(pile) / sum(map(len, piles.values())) for group, pile in piles.items()}
    if settings.partition == "source":
        kinds = sorted(set(of_source.values()))
        mine = kinds[device % len(kinds)]
        return {group: share * (of_source[group] == mine) for group, share in left.items()}
    if settings.partition == "dirichlet":
        kinds = sorted(set(of_label.values()))
        drawn = dict(zip(kinds, rng.dirichlet([settings.alpha] * len(kinds)), strict=True))
        return {group: drawn[of_label[group]] / sum(of_label[g] == of_label[group] for g in piles) for group in piles}
    return left


def _take(rng: np.random.Generator, piles: dict[int, list[int]], shares: dict[int, float], size: int) -> list[int]:
    """`size` examples off the piles in these proportions; from the fullest where a pile has run out."""
    order = sorted(shares)
    weights = np.array([shares[group] for group in order])
    if not weights.any():  # nothing of its own kind is left for this device
        weights = np.array([len(piles[group]) for group in order], float)
    taken: list[int] = []
    for group in rng.choice(order, size, p=weights / weights.sum()):
        pile = piles[int(group)] or max(piles.values(), key=len)
        taken.append(pile.pop())
    return taken


def _split(shard: list[int], settings: DataSettings) -> Shard:
    """A third at most is measured on."""
    count = max(1, min(settings.held_out, len(shard) // 3))
    return Shard(tuple(sorted(shard[count:])), tuple(sorted(shard[:count])))
