"""The owner's rules.toml, and the minutes trained per day."""

import json
from datetime import date, timedelta
from pathlib import Path

import pytest

from device_agent.policy.evaluator import KEPT_DAYS, DailyMinutes, OwnerConsent, load_rules
from shared.errors import BadRequest
from shared.rules import QuietHours, Rules

TODAY = date(2026, 11, 21)


def test_minutes_add_up_by_day_and_are_found_again(tmp_path):
    budget = DailyMinutes(tmp_path / "budget.json")
    assert budget.spent(TODAY) == 0
    budget.add(12.5, TODAY)
    budget.add(0.25, TODAY)
    again = DailyMinutes(tmp_path / "budget.json")
    assert again.spent(TODAY) == 12.75
    assert again.spent(TODAY + timedelta(days=1)) == 0
    for minutes in (60, 3):  # by a clock that steps back
        budget.add(minutes, TODAY - timedelta(days=1))
    assert (budget.spent(TODAY - timedelta(days=1)), budget.spent(TODAY)) == (63, 12.75)


def test_days_of_a_clock_far_ahead_do_not_push_out_the_true_ones(tmp_path):
    budget = DailyMinutes(tmp_path / "budget.json")
    for day in range(3 * KEPT_DAYS):
        budget.add(1, TODAY + timedelta(days=4000 + day))
        budget.add(1, TODAY)
    assert DailyMinutes(tmp_path / "budget.json").spent(TODAY) == 3 * KEPT_DAYS
    assert len(json.loads((tmp_path / "budget.json").read_text())) == KEPT_DAYS


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"\xff", b'{"today": 1}', b'{"2026-11-21": "1"}', b'{"2026-11-21": -1}']
)
def test_a_damaged_file_counts_as_empty(tmp_path, text):
    (tmp_path / "budget.json").write_bytes(text)
    budget = DailyMinutes(tmp_path / "budget.json")
    assert budget.spent(TODAY) == 0
    budget.add(2, TODAY)
    assert DailyMinutes(tmp_path / "budget.json").spent(TODAY) == 2


def test_a_full_disk_is_told_and_the_minutes_still_count(tmp_path, monkeypatch):
    budget = DailyMinutes(tmp_path / "budget.json")
    budget.add(1, TODAY)
    with monkeypatch.context() as full:
        full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            budget.add(4, TODAY)
    assert budget.spent(TODAY) == 5
    assert DailyMinutes(tmp_path / "budget.json").spent(TODAY) == 1


WHOLE = """
charging = false
battery_floor = 30
temperature_ceiling = 75.5
memory_floor_bytes = 1_000_000_000
idle = true
hours = [{ start = "22:00", end = "06:00" }, { start = 21:30:00, end = 23:00:00 }]
metered = false
daily_minutes = 90
"""


def test_every_rule_is_read(tmp_path):
    (tmp_path / "rules.toml").write_text(WHOLE)
    assert load_rules(tmp_path / "rules.toml")[0] == Rules(
        battery_floor=30,
        temperature_ceiling=75.5,
        memory_floor_bytes=1_000_000_000,
        idle=True,
        hours=(QuietHours(start="22:00", end="06:00"), QuietHours(start="21:30", end="23:00")),
        metered=False,
        daily_minutes=90,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", OwnerConsent(trajectory=False, cohorts=False)),
        ("trajectory = true", OwnerConsent(trajectory=True, cohorts=False)),
        ("cohorts = true", OwnerConsent(trajectory=False, cohorts=True)),
        ('cohorts = ["reviews", "notes"]', OwnerConsent(trajectory=False, cohorts=("reviews", "notes"))),
        ("masked_among = 10", OwnerConsent(masked_among=10)),
        ("privacy_limit = 8", OwnerConsent(privacy_limit=8)),
        (
            "privacy_limit = { reviews = 3 }\nprivacy_delta = 1e-6",
            OwnerConsent(privacy_limit={"reviews": 3.0}, privacy_delta=1e-6),
        ),
    ],
)
def test_nothing_more_leaves_this_device_unless_the_owner_says_so(tmp_path, text, expected):
    path = tmp_path / "rules.toml"
    assert load_rules(path)[1] == OwnerConsent(trajectory=False, cohorts=False)
    path.write_text(f"idle = true\n{text}\n")
    assert load_rules(path)[1] == expected
    assert load_rules(path)[0] == Rules(idle=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('trajectory = "asked"', "trajectory: .*valid boolean"),
        ('cohorts = "reviews"', "cohorts.*true for every cohort, or a list of cohorts"),
        ('cohorts = ["Two Words"]', "cohorts.*true for every cohort, or a list of cohorts"),
        ("masked_among = true", "masked_among: .*valid integer"),
        ("privacy_limit = { reviews = -1 }", "privacy_limit.*epsilon of all runs .*by name"),
        ("privacy_delta = 0", "privacy_delta: .*greater than 0"),
        (f"cohorts = {[f'c{index}' for index in range(101)]}", "cohorts.*a list of cohorts"),
    ],
)
def test_a_consent_that_is_none(tmp_path, text, message):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(BadRequest, match=message):
        load_rules(tmp_path / "rules.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("battery_floor = 130", "battery_floor: .*less than or equal to 100 .percent"),
        ("temperature_ceiling = 0", "temperature_ceiling: .*greater than 0 .degrees Celsius"),
        ("memory_floor_bytes = 1.5", "memory_floor_bytes: .*valid integer"),
        ('charging = "sometimes"', "charging: .*valid boolean"),
        ('hours = ["22:00"]', "hours.0: .*docs/policy.md"),
        ('hours = [{ start = "22:00Z", end = "06:00" }]', "local time: write 22:00, without a zone"),
        ("daily_minutes = -1", "daily_minutes: .*greater than or equal to 0"),
        ("battery = 30", "'battery' is not a rule; the rules are charging, battery_floor"),
        ("battery_floor 30", "is not valid TOML"),
    ],
)
def test_a_wrong_rule_is_named_with_what_may_be_said(tmp_path, text, message):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(BadRequest, match=message) as error:
        load_rules(tmp_path / "rules.toml")
    assert str(tmp_path / "rules.toml") in error.value.detail
    assert "\n" not in error.value.detail


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match=r"rules\.toml cannot be read"):
        load_rules(tmp_path / "rules.toml")
    with pytest.raises(BadRequest, match="cannot be read"):
        load_rules(tmp_path)


def test_the_example_in_the_documentation_is_one(tmp_path):
    text = (Path(__file__).resolve().parents[3] / "docs/policy.md").read_text()
    (tmp_path / "rules.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    assert load_rules(tmp_path / "rules.toml")[0].model_fields_set == set(Rules.model_fields)
