"""Cohorts with private examples: gradients are clipped, no accuracy is measured, and epsilon is reported."""

import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'mobizo[privacy]'")


@pytest.mark.slow
def test_a_private_cohort_reports_no_accuracy_and_is_reproducible(run, tmp_path):
    examples = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, "sampling_rate": 0.5}
    changes = {"cohort": {"recipe": {"privacy": "clipped"}, "privacy": {"examples": examples}}}
    program = tmp_path / "clipping"
    outcome = run(changes, program=program)
    assert outcome.manifest.recipe.privacy == "clipped"
    for record in outcome.rounds[1:]:
        assert record.published
        assert record.update_norm > 0
        assert (record.start_accuracy, record.tuned_accuracy) == (None, None)
    spent = [record.epsilon["examples"] for record in outcome.rounds]
    assert 0 == spent[0] < spent[1] < spent[2]
    assert run(changes, program=program).digest == outcome.digest
    assert run(changes | {"seed": 1}, program=program).rounds[1].b_sha256 != outcome.rounds[1].b_sha256
