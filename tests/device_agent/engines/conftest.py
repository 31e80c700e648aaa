"""A phone, for the engine that trains on one."""

import pytest

from tests.device_agent.android.conftest import adb, machine, phone

__all__ = ["adb", "machine", "phone"]

# Tests that `make test` runs with the native runner alone: each start of the Python engine loads torch for seconds.
# Its process is tested by itself in tests/device_agent/training/test_trainer_process.py.
NATIVE_FIRST = {
    "test_it_stops_after_the_call_in_progress",
    "test_another_runs_ledger_is_refused",
    "test_a_program_that_does_not_load_is_one_clear_line",
    "test_killed_at_once_it_says_memory",
    "test_a_disk_that_is_full_when_usage_is_noted_loses_nothing",
    "test_killed_after_the_last_step_it_ends_with_the_same_bytes",
    "test_the_last_b_is_handed_in_and_its_validation_reported",
    "test_a_start_that_is_another_file_is_refused",
    "test_limits_are_obeyed_and_noted",
    "test_limits_that_change_hold_from_the_next_step",
    "test_a_diverging_run_ends_with_its_reason",
    "test_bad_data_is_told_without_a_word_of_it",
    "test_a_full_disk_loses_nothing",
    "test_killed_it_goes_on_from_the_start_again",
    "test_the_same_engine_makes_the_same_bytes",
    "test_killed_it_ends_with_the_same_bytes",
    "test_a_stopped_run_goes_on",
    "test_a_damaged_checkpoint_is_not_used",
    "test_checkpoints_of_another_run_are_not_used",
    "test_a_torn_ledger_loses_its_last_frame_only",
    "test_a_disk_that_is_full_at_a_checkpoint_loses_nothing",
    "test_a_rate_that_is_too_high_says_so",
    "test_a_run_that_is_pulled_goes_on_from_its_start",
}
FIRST_PROGRAMS = {"rademacher", "stored"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        found = item.callspec.params if hasattr(item, "callspec") else {}
        python = item.path.parent.name == "engines" and found.get("engine") == "python"
        if python and item.originalname in NATIVE_FIRST:
            item.add_marker(pytest.mark.slow)
        both = item.originalname == "test_both_engines_make_one_ledger_and_one_result"
        if both and found["program"] not in FIRST_PROGRAMS:
            item.add_marker(pytest.mark.slow)
