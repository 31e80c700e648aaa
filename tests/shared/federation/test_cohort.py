"""Contradictory cohort settings are rejected."""

import pytest
from pydantic import ValidationError

from shared.federation.cohort import CohortSettings

EXAMPLES, MEMBERS = {"noise_multiplier": 1, "sampling_rate": 0.1}, {"clip": 1, "noise_multiplier": 1}
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
        ({"privacy": {}}, "examples, members or both"),
        ({"privacy": {"examples": {"sampling_rate": 0.1}}}, "noise_multiplier, or epsilon"),
        ({"privacy": {"examples": EXAMPLES}}, "must be set together"),
        ({"privacy": {"members": MEMBERS}, "weights": "examples"}, "weights equal"),
        ({"privacy": {"members": MEMBERS}, "aggregator": {"name": "median"}}, "aggregator mean"),
        ({"privacy": {"members": MEMBERS}, "aggregator": {"clip_norm": 1}}, "its own clip"),
        ({"privacy": {"members": MEMBERS | {"noise_multiplier": 0}}}, "greater than or equal to 0.3"),
        ({"quorum": 0}, "quorum"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"optimizer": {"lr": float("inf")}}, "lr"),
    ],
)
def test_contradictory_cohort_settings_are_rejected(changes, message):
    with pytest.raises(ValidationError, match=message):
        CohortSettings.model_validate(MINIMAL_SETTINGS | changes)
