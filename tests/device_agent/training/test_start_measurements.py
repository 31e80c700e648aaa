"""What later runs read instead of measuring it again."""

import numpy as np
import pytest

from device_agent.training import start_measurements
from device_agent.training.start_measurements import StartMeasurements
from shared.canonical import file_sha256
from tests.device_agent.training.runs import begun, count_calls, hashes, opened, train, train_in_process
from tests.device_agent.training.test_reference_texts import TEXTS, plan_of


@pytest.fixture
def plan(stored, dataset, tmp_path):
    plan = plan_of(stored, dataset, steps=4, lr=0.3, evaluation_interval=2)
    return plan.model_copy(update={"measurements": tmp_path / "measurements"})


def test_a_later_run_ends_with_the_same_bytes_and_measures_its_start_no_more(plan, stored, launcher, tmp_path):
    runs = [begun(tmp_path / name, plan) for name in ("first", "later")]
    alone = begun(tmp_path / "alone", plan.model_copy(update={"measurements": None}))
    results = [train(run, launcher) for run in (*runs, alone)]
    assert hashes(runs[0]) == hashes(runs[1]) == hashes(alone)
    assert results[1].evaluations == results[2].evaluations
    files = list((plan.measurements / launcher.name).iterdir())
    assert len(files) == 5  # metrics of three splits, the baseline, and states
    assert not any(text.encode() in file.read_bytes() for text in TEXTS for file in files)
    # Another start is measured, by the same states of the reference texts.
    start = {"start": runs[0].best, "start_sha256": file_sha256(runs[0].best)}
    train(begun(tmp_path / "continued", plan.model_copy(update=start)), launcher)
    assert len(list((plan.measurements / launcher.name).iterdir())) == 8


def test_the_program_is_called_no_more_than_needed(plan, stored, tmp_path):
    calls = []
    for name in ("first", "later"):
        runtime = opened(plan)
        counted = count_calls(runtime)
        kept = StartMeasurements(plan.measurements, plan)
        train_in_process(begun(tmp_path / name, plan), plan, stored, runtime=runtime, kept=kept)
        runtime.close()
        calls.append(counted)
    assert calls[1]["score_suffix"] < calls[0]["score_suffix"]
    assert calls[1]["suffix"] == calls[0]["suffix"]


def test_a_damaged_file_is_measured_again_and_old_ones_go(plan, stored, launcher, dataset, tmp_path, monkeypatch):
    first = begun(tmp_path / "first", plan)
    train(first, launcher)
    directory = plan.measurements / launcher.name
    for file in directory.iterdir():
        file.write_bytes(b"{")
    again = begun(tmp_path / "again", plan)
    train(again, launcher)
    assert hashes(again) == hashes(first)
    monkeypatch.setattr(start_measurements, "MAX_BYTES", 200)
    kept, examples = StartMeasurements(directory, plan), stored.examples(dataset)
    kept.keep_states(examples, np.zeros(25, np.float32))
    kept.keep_states(examples[:1], np.zeros(25, np.float32))
    assert len(list(directory.iterdir())) == 2
    assert kept.states(examples[:1]).tolist() == [0.0] * 25
    monkeypatch.setattr(start_measurements, "MAX_FILES", 1)
    kept.keep_states(examples[:2], np.zeros(1, np.float32))
    assert (kept.states(examples[:1]), kept.states(examples[:2]).tolist()) == (None, [0.0])
