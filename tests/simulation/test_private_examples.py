"""Devices whose examples are private: the program clips, nothing is measured on them, and the price is told."""

import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'mobizo[privacy]'")


@pytest.mark.slow
def test_a_private_cohort_learns_in_secret_and_is_repeated_from_its_seed(run, tmp_path):
    examples = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "sampling_rate": 0.5}
    changes = {"cohort": {"recipe": {"privacy": "clipped"}, "privacy": {"examples": examples}}}
    program = tmp_path / "clipping"
    found = run(changes, program=program)
    assert found.manifest.recipe.privacy == "clipped"
    for told in found.rounds[1:]:
        assert told.published
        assert told.update_norm > 0
        assert (told.start_accuracy, told.tuned_accuracy) == (None, None)
    spent = [told.epsilon["examples"] for told in found.rounds]
    assert 0 == spent[0] < spent[1] < spent[2]
    assert run(changes, program=program).digest == found.digest
    assert run(changes | {"seed": 1}, program=program).rounds[1].b_sha256 != found.rounds[1].b_sha256
