"""Contradictory cohort settings are rejected."""

import pytest
from pydantic import ValidationError

from shared.federation.cohort import CohortSettings

MINIMAL_SETTINGS = {"name": "readers", "base": "tiny", "task": "sst2", "dataset": "movies"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"name": "fedprox"}}, "mu > 0"),
        ({"algorithm": {"mu": 200}, "training": {"lr": 0.01}}, "overshoots the start"),
        ({"training": {"patience": 2}}, "members train all steps"),
        ({"algorithm": {"name": "fedbuff", "buffer_size": 1}}, "buffer_size"),
        ({"aggregator": {"name": "krum", "krum_f": 2}, "quorum": 6}, "raise quorum"),
        ({"aggregator": {"name": "median"}, "weights": "examples"}, "weights equal"),
        ({"upload": "masked"}, "masking"),
        ({"upload": "trajectory", "recipe": {"estimator": "stored"}}, "replay"),
        ({"privacy": {"members": {"clip": 1, "noise_multiplier": 1}}, "weights": "examples"}, "equal"),
        ({"quorum": 0}, "quorum"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"optimizer": {"lr": float("inf")}}, "lr"),
    ],
)
def test_contradictory_cohort_settings_are_rejected(changes, message):
    with pytest.raises(ValidationError, match=message):
        CohortSettings.model_validate(MINIMAL_SETTINGS | changes)
