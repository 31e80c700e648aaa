"""Partitions one pool of labelled examples into the shards of many devices.

source: label proportions from a Dirichlet distribution, Hsu et al., "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulation.randomness import generator
from simulation.settings import DataSettings

I64 = NDArray[np.int64]
MIN_TRAIN_EXAMPLES = 2  # minimum training examples of a device


@dataclass(frozen=True)
class Shard:
    """A device's part of the pool, by index. held_out: evaluation examples, which no device trains on."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def partition(
    settings: DataSettings, devices: int, seed: int, labels: Sequence[int], sources: Sequence[int]
) -> list[Shard]:
    """Returns one shard for each device. labels, sources: of each example of the pool.

    Shards are disjoint. If the pool is too small, all shards shrink in proportion. Raises ValueError if there are too
    few examples for each device to have MIN_TRAIN_EXAMPLES training examples and one for evaluation.
    """
    sizes = _sizes(settings, devices, seed, len(labels))
    rng = generator(seed, "shards")
    groups = np.array(labels) + (max(labels) + 1) * np.array(sources)
    remaining = {int(group): rng.permutation(np.flatnonzero(groups == group)).tolist() for group in np.unique(groups)}
    of_label = {group: group % (max(labels) + 1) for group in remaining}
    of_source = {group: group // (max(labels) + 1) for group in remaining}
    shards = []
    for device, size in enumerate(sizes):
        shares = _shares(settings, rng, remaining, of_label, of_source, device)
        shards.append(_draw_examples(rng, remaining, shares, int(size)))
    return [_split(shard, settings) for shard in shards]


def _sizes(settings: DataSettings, devices: int, seed: int, pool: int) -> I64:
    """Returns the number of examples of each device, including those for evaluation."""
    rng = generator(seed, "sizes")
    mean_size = settings.per_device + min(settings.held_out, settings.per_device // 2)
    unrounded = mean_size * np.exp(settings.skew * rng.standard_normal(devices) - settings.skew**2 / 2)
    unrounded *= min(1.0, pool / unrounded.sum())
    if devices * (MIN_TRAIN_EXAMPLES + 1) > pool:
        raise ValueError(f"{pool} examples are too few for {devices} devices; give more data, or fewer devices")
    sizes = np.maximum(unrounded.astype(np.int64), MIN_TRAIN_EXAMPLES + 1)
    while sizes.sum() > pool:  # the largest shards shrink to make room for the minimum sizes
        sizes[sizes.argmax()] -= 1
    return sizes


def _shares(
    settings: DataSettings,
    rng: np.random.Generator,
    remaining: dict[int, list[int]],
    of_label: dict[int, int],
    of_source: dict[int, int],
    device: int,
) -> dict[int, float]:
    """Returns the proportions in which a device takes examples from the groups."""
    proportions = {group: len(indices) / sum(map(len, remaining.values())) for group, indices in remaining.items()}
    if settings.partition == "source":
        values = sorted(set(of_source.values()))
        own_source = values[device % len(values)]
        return {group: share * (of_source[group] == own_source) for group, share in proportions.items()}
    if settings.partition == "dirichlet":
        values = sorted(set(of_label.values()))
        label_shares = dict(zip(values, rng.dirichlet([settings.alpha] * len(values)), strict=True))
        return {
            group: label_shares[of_label[group]] / sum(of_label[g] == of_label[group] for g in remaining)
            for group in remaining
        }
    return proportions


def _draw_examples(
    rng: np.random.Generator, remaining: dict[int, list[int]], shares: dict[int, float], size: int
) -> list[int]:
    """Takes `size` examples in these proportions, or from the largest group if one is empty."""
    order = sorted(shares)
    weights = np.array([shares[group] for group in order])
    if not weights.any():  # no examples of the device's own source or labels are left
        weights = np.array([len(remaining[group]) for group in order], float)
    examples: list[int] = []
    for group in rng.choice(order, size, p=weights / weights.sum()):
        indices = remaining[int(group)] or max(remaining.values(), key=len)
        examples.append(indices.pop())
    return examples


def _split(shard: list[int], settings: DataSettings) -> Shard:
    """Splits a shard into training examples and at most a third evaluation examples."""
    count = max(1, min(settings.held_out, len(shard) // 3))
    return Shard(tuple(sorted(shard[count:])), tuple(sorted(shard[:count])))
