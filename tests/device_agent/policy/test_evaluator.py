"""The minutes trained per day."""

import json
import signal
import subprocess
import sys
from datetime import date, timedelta

import pytest

from device_agent.policy.evaluator import KEPT_DAYS, DailyMinutes

TODAY = date(2026, 11, 21)
YESTERDAY = TODAY - timedelta(days=1)

ENDLESS = """
import sys
from datetime import date
from pathlib import Path
from device_agent.policy.evaluator import DailyMinutes
budget = DailyMinutes(Path(sys.argv[1]))
while True:
    budget.add(1, date(2026, 11, 21))
    print(budget.spent(date(2026, 11, 21)), flush=True)
"""


def test_minutes_add_up_by_day_and_are_found_again(tmp_path):
    budget = DailyMinutes(tmp_path / "budget.json")
    assert budget.spent(TODAY) == 0
    budget.add(12.5, TODAY)
    budget.add(0.25, TODAY)
    again = DailyMinutes(tmp_path / "budget.json")
    assert again.spent(TODAY) == 12.75
    assert again.spent(TODAY + timedelta(days=1)) == 0


def test_a_clock_that_steps_back_gives_no_minute_twice(tmp_path):
    budget = DailyMinutes(tmp_path / "budget.json")
    budget.add(60, YESTERDAY)
    budget.add(5, TODAY)
    budget.add(3, YESTERDAY)
    assert (budget.spent(YESTERDAY), budget.spent(TODAY)) == (63, 5)


def test_days_of_a_clock_far_ahead_do_not_push_out_the_true_ones(tmp_path):
    budget = DailyMinutes(tmp_path / "budget.json")
    for day in range(3 * KEPT_DAYS):
        budget.add(1, TODAY + timedelta(days=4000 + day))
        budget.add(1, TODAY)
    assert DailyMinutes(tmp_path / "budget.json").spent(TODAY) == 3 * KEPT_DAYS
    assert len(json.loads((tmp_path / "budget.json").read_text())) == KEPT_DAYS


def test_a_kill_loses_no_minute_that_was_added(tmp_path):
    """The process is killed at some point of the addition after the one it told of last."""
    path = tmp_path / "budget.json"
    for told_lines in (1, 7, 20):
        process = subprocess.Popen([sys.executable, "-c", ENDLESS, path], stdout=subprocess.PIPE, text=True)
        for _ in range(told_lines):
            line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        told = float((rest.splitlines() or [line])[-1])
        assert told <= DailyMinutes(path).spent(TODAY) <= told + 1


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"\xff", b'{"today": 1}', b'{"2026-11-21": "1"}', b'{"2026-11-21": -1}']
)
def test_a_damaged_file_counts_as_empty(tmp_path, text):
    (tmp_path / "budget.json").write_bytes(text)
    budget = DailyMinutes(tmp_path / "budget.json")
    assert budget.spent(TODAY) == 0
    budget.add(2, TODAY)
    assert DailyMinutes(tmp_path / "budget.json").spent(TODAY) == 2


@pytest.mark.parametrize("minutes", [-0.1, float("nan"), float("inf")])
def test_time_that_is_none_is_refused(tmp_path, minutes):
    with pytest.raises(ValueError, match="not a training time"):
        DailyMinutes(tmp_path / "budget.json").add(minutes, TODAY)


def test_a_full_disk_is_told_and_the_minutes_still_count(tmp_path, monkeypatch):
    budget = DailyMinutes(tmp_path / "budget.json")
    budget.add(1, TODAY)
    with monkeypatch.context() as full:
        full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            budget.add(4, TODAY)
    assert budget.spent(TODAY) == 5
    assert DailyMinutes(tmp_path / "budget.json").spent(TODAY) == 1
