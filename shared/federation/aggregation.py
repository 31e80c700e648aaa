"""Aggregation of a round's updates: weights, staleness, clipping and the aggregator that the cohort names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import numpy as np

from shared.entropy import Entropy
from shared.federation import robust
from shared.federation.algorithms import ServerAlgorithm, algorithm_of
from shared.federation.cohort import AggregatorSettings, CohortSettings, Weights
from shared.federation.mean import WeightedMean
from shared.federation.sources import UpdateSource
from shared.federation.update import F32, Contribution
from shared.privacy import MemberPrivacy, noised_mean


@dataclass(frozen=True)
class Weighting:
    """The weight of each update."""

    server: ServerAlgorithm = field(default_factory=ServerAlgorithm)
    weights: Weights = "equal"
    most_examples: int = 1000  # cap on the number of examples that a device claims

    def weight(self, contribution: Contribution) -> float:
        """Returns the weight of an update in the mean, before staleness."""
        if self.weights == "equal":
            return 1.0
        return float(min(max(contribution.examples, 1), self.most_examples))

    def scale(self, contribution: Contribution) -> float:
        """Returns the factor applied to a stale update."""
        return self.server.scale(contribution.staleness)


@dataclass(frozen=True)
class AggregationResult:
    """The result of aggregating a round's updates."""

    update: F32  # (D,)
    count: int  # updates that were considered
    weight: float  # sum of the weights of those that are in it
    clipped: int  # updates that were scaled down to the clip norm
    chosen: tuple[str, ...] | None = None  # members chosen by the aggregator (Krum); None: all


def aggregate(cohort: CohortSettings, source: UpdateSource, entropy: Entropy = os.urandom) -> AggregationResult:
    """Aggregates a round's updates as its cohort specifies: algorithm, weights, aggregator and, if private, noise.

    entropy: source of the noise. Raises InvalidUpload for an unusable update, ValueError for settings that do not fit
    the number of updates.
    """
    weighting = Weighting(algorithm_of(cohort.algorithm).server, cohort.weights, cohort.most_examples)
    if cohort.privacy is not None and cohort.privacy.members is not None:
        return combine_privately(source, cohort.privacy.members, weighting, entropy)
    return combine(source, cohort.aggregator, weighting)


def combine(source: UpdateSource, settings: AggregatorSettings, weighting: Weighting) -> AggregationResult:
    """Aggregates all updates: clips them to `clip_norm`, scales them for staleness and applies the aggregator.

    Raises InvalidUpload for an unusable update, ValueError for settings that do not fit the number of updates.
    """
    if settings.name == "mean":
        return _mean(source, settings.clip_norm, weighting)
    norms = [update.norm for update in source.updates()]
    clips = [robust.clip_scale(norm, settings.clip_norm) for norm in norms]
    scales = [
        clip * weighting.scale(contribution) for clip, contribution in zip(clips, source.contributions, strict=True)
    ]
    count, clipped = len(norms), sum(clip < 1 for clip in clips)
    if settings.name == "median":
        return AggregationResult(robust.columnwise(source, scales, robust.median), count, count, clipped)
    if settings.name == "trimmed_mean":
        share = settings.trim_share
        flat = robust.columnwise(source, scales, lambda block: robust.trimmed_mean(block, share))
        return AggregationResult(flat, count, count, clipped)
    scores = robust.krum_scores(source, scales, norms, settings.krum_f)
    selected_numbers = robust.krum_choice(scores, settings.krum_f, several=settings.name == "multi_krum")
    mean = WeightedMean(source.size)
    for number, update in enumerate(source.updates()):
        if number in selected_numbers:
            mean.add(update.flat, scale=scales[number])
    members = tuple(source.contributions[number].member for number in selected_numbers)
    return AggregationResult(mean.result(), count, mean.weight, clipped, members)


def combine_privately(
    source: UpdateSource, privacy: MemberPrivacy, weighting: Weighting, entropy: Entropy = os.urandom
) -> AggregationResult:
    """Returns the mean of clipped updates of equal weight with noise added; see `shared.privacy.noised_mean`.

    Raises InvalidUpload for an unusable update, ValueError for weights that are not equal.
    """
    if weighting.weights != "equal":
        raise ValueError("a private mean requires equal weights")
    mean = _mean(source, privacy.clip, weighting)
    noised = noised_mean(mean.update.astype(np.float64), mean.count, privacy, entropy)
    return replace(mean, update=noised.astype(np.float32))


def _mean(source: UpdateSource, clip_norm: float | None, weighting: Weighting) -> AggregationResult:
    mean, clipped = WeightedMean(source.size), 0
    for update in source.updates():
        clip = robust.clip_scale(update.norm, clip_norm) if clip_norm is not None else 1.0
        clipped += clip < 1
        mean.add(update.flat, weighting.weight(update.contribution), clip * weighting.scale(update.contribution))
    return AggregationResult(mean.result(), mean.count, mean.weight, clipped)
