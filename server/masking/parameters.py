"""What all devices of a masked round agree on, from what its cohort is set to. Knows no database."""

from __future__ import annotations

from server.cohorts.models import Cohort, CohortRound
from shared.masking.settings import MaskingParameters


def masking_parameters(cohort: Cohort, found: CohortRound) -> MaskingParameters | None:
    """A round's parameters; None where its updates are not masked."""
    settings, masking = cohort.settings, cohort.settings.masking
    if masking is None or settings.aggregator.clip_norm is None:
        return None
    return MaskingParameters(
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
