"""What a cohort may be set to, and what its versions' manifests say."""

import json

import pytest
from pydantic import ValidationError

from shared.canonical import canonical_json
from shared.federation.cohort import CohortOrigin, CohortSettings
from shared.registry import AdapterManifest

LEAST = {"name": "readers", "base": "tiny", "task": "sst2", "dataset": "movies"}


@pytest.mark.parametrize(
    ("changes", "words"),
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
def test_what_does_not_fit_together_is_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        CohortSettings.model_validate(LEAST | changes)


def test_krum_with_enough_is_taken():
    aggregator = {"name": "krum", "krum_f": 2}
    assert CohortSettings.model_validate(LEAST | {"aggregator": aggregator, "quorum": 7}).quorum == 7


def manifest(**changes):
    recipe = {"base": {"name": "tiny", "sha256": "b" * 64}, "answer_length": 1, "choices": 2}
    facts = {
        "tenant": "t",
        "adapter": "a",
        "version": 1,
        "user": "u",
        "base": recipe["base"],
        "recipe": recipe,
        "recipe_id": "0" * 64,
        "a_sha256": "1" * 64,
        "sha256": "2" * 64,
        "size": 4,
        "size_d": 1,
        "job_id": "j",
        "device_id": "d",
        "task": {
            "name": "t",
            "prompt": "{text}",
            "answers": [{"text": " a", "labels": ["a"]}, {"text": " b", "labels": ["b"]}],
        },
        "training": {},
        "result": {
            "steps": 1,
            "best_step": 1,
            "train_seconds": 0,
            "seconds": 0,
            "peak_rss_bytes": 0,
            "train_examples": 1,
            "truncated_examples": 0,
        },
        "created_at": "2026-01-01T00:00:00Z",
    }
    return AdapterManifest.model_validate(facts | changes)


def test_a_manifest_of_no_cohort_has_the_bytes_it_always_had():
    told = json.loads(manifest().canonical())
    assert "cohort" not in told
    assert (told["job_id"], told["device_id"], told["parent"]) == ("j", "d", None)


def test_a_cohort_s_manifest_says_which_round_made_it():
    origin = {"cohort": "a", "round": 2, "updates": 5, "algorithm": {}, "aggregator": {}, "optimizer": {}}
    made = manifest(job_id=None, device_id=None, cohort=origin)
    assert made.cohort == CohortOrigin.model_validate(origin)
    assert json.loads(made.canonical())["cohort"]["updates"] == 5
    again = AdapterManifest.model_validate_json(made.model_dump_json())
    assert again.canonical() == made.canonical() == canonical_json(made.model_dump(mode="json"))
