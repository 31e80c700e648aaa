"""The load of `bench server`, small: devices and an app of locust against a real server."""

import pytest

from bench.server.cohorts import rounds
from bench.server.fleet import REQUEST_KINDS, fleet
from bench.server.home import make_home, spread
from bench.server.polls import poll


def test_spread():
    figures = spread([0.001 * number for number in range(1, 101)])
    assert figures["count"] == 100
    assert round(figures["p50_ms"], 1) == 50.5
    assert round(figures["max_ms"]) == 100


@pytest.mark.slow
def test_devices_see_jobs_to_their_end(tmp_path):
    load_settings = {"jobs": 6, "rate": 4.0, "wait_seconds": 2.0, "heartbeat_seconds": 0.05, "ramp_seconds": 1.0}
    rows = {row["what"]: row for row in poll(make_home(tmp_path), "sqlite", 3, **load_settings)}
    assert rows["errors"]["count"] == 0, rows["errors"]
    assert rows["submission"]["count"] == 6
    assert rows["job to a device"]["count"] == rows["completion"]["count"] == rows["upload"]["count"] == 6
    assert rows["heartbeat"]["count"] == 12
    assert rows["server"]["peak_rss_bytes"] > 1 << 20


@pytest.mark.slow
def test_virtual_devices_live_their_lives_without_an_error(tmp_path):
    rows = fleet(make_home(tmp_path), 4, quick=True)
    kinds = {row["what"]: row for row in rows if "cpu_ms" in row}
    assert set(kinds) == {*REQUEST_KINDS, "connect"}
    assert [row["first"] for row in kinds.values()] == [[]] * len(kinds)
    assert kinds["acquire"]["count"] == kinds["release"]["count"] == 4
    leases = next(row for row in rows if row.get("table") == "leases")
    assert leases["rows"] == 1.0


@pytest.mark.slow
def test_cohorts_of_virtual_devices_publish_their_rounds(tmp_path):
    rows, claims = rounds(make_home(tmp_path), 6, 2, {}, rounds_each=2, wait_seconds=2.0)
    assert rows[0]["states"] == {"published": 4}
    assert rows[0]["updates"] == 12
    assert claims["cohort_errors"] == 0
    grown = {row["table"]: row["rows"] for row in rows if "table" in row}
    assert grown["cohort_updates"] == grown["jobs"] == 1.0
