"""Partitions one pool of labelled examples into the shards of many devices.

source: label proportions from a Dirichlet distribution, Hsu et al., "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulation.draws import generator
from simulation.settings import DataSettings

I64 = NDArray[np.int64]
LEAST = 2  # minimum training examples of a device


@dataclass(frozen=True)
class Shard:
    """A device's part of the pool, by index. held_out: evaluation examples, which no device trains on."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def cut(settings: DataSettings, devices: int, seed: int, labels: Sequence[int], sources: Sequence[int]) -> list[Shard]:
    """Returns one shard for each device. labels, sources: of each example of the pool.

    Shards are disjoint. If the pool is too small, all shards shrink in proportion. Raises ValueError if there are too
    few examples for each device to have LEAST training examples and one for evaluation.
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
    """Returns the number of examples of each device, including those for evaluation."""
    rng = generator(seed, "sizes")
    whole = settings.per_device + min(settings.held_out, settings.per_device // 2)
    raw = whole * np.exp(settings.skew * rng.standard_normal(devices) - settings.skew**2 / 2)
    raw *= min(1.0, pool / raw.sum())
    if devices * (LEAST + 1) > pool:
        raise ValueError(f"{pool} examples are too few for {devices} devices; give more data, or fewer devices")
    sizes = np.maximum(raw.astype(np.int64), LEAST + 1)
    while sizes.sum() > pool:  # the largest shards shrink to make room for the minimum sizes
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
    """Returns the proportions in which a device takes examples from the piles."""
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
    """Takes `size` examples from the piles in these proportions, or from the fullest pile if one is empty."""
    order = sorted(shares)
    weights = np.array([shares[group] for group in order])
    if not weights.any():  # the piles of the device's own kind are empty
        weights = np.array([len(piles[group]) for group in order], float)
    taken: list[int] = []
    for group in rng.choice(order, size, p=weights / weights.sum()):
        pile = piles[int(group)] or max(piles.values(), key=len)
        taken.append(pile.pop())
    return taken


def _split(shard: list[int], settings: DataSettings) -> Shard:
    """Splits a shard into training and evaluation examples, of which there are at most a third."""
    count = max(1, min(settings.held_out, len(shard) // 3))
    return Shard(tuple(sorted(shard[count:])), tuple(sorted(shard[:count])))
