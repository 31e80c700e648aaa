"""Derives the secure-aggregation parameters of a round from the settings of its cohort."""

from __future__ import annotations

from server.federation.models import Cohort, CohortRound
from shared.federation.secure_aggregation.settings import SecureAggregationParameters


def secure_aggregation_parameters(cohort: Cohort, found: CohortRound) -> SecureAggregationParameters | None:
    """Returns the parameters of a round, or None if its updates are not masked."""
    settings, masking = cohort.settings, cohort.settings.masking
    if masking is None or settings.aggregator.clip_norm is None:
        return None
    return SecureAggregationParameters(
        cohort=cohort.name,
        round=found.position,
        start_sha256=found.start_sha256,
        recipe_id=cohort.recipe_id,
        size=cohort.size_d,
        clip=settings.aggregator.clip_norm,
        most_weight=settings.most_weight,
        most_members=masking.most_members,
        minimum=masking.minimum,
        threshold=masking.threshold,
        bits=masking.bits,
    )
