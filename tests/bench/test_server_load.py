"""The load of `bench server`, small: devices and an app of locust against a real server."""

import pytest

from bench.server.home import make_home
from bench.server.polls import poll


@pytest.mark.slow
def test_devices_see_jobs_to_their_end(tmp_path):
    load_settings = {"jobs": 6, "rate": 4.0, "wait_seconds": 2.0, "heartbeat_seconds": 0.05, "ramp_seconds": 1.0}
    rows = {row["what"]: row for row in poll(make_home(tmp_path), "sqlite", 3, **load_settings)}
    assert rows["errors"]["count"] == 0, rows["errors"]
    assert rows["submission"]["count"] == 6
    assert rows["job to a device"]["count"] == rows["completion"]["count"] == rows["upload"]["count"] == 6
    assert rows["heartbeat"]["count"] == 12
    assert rows["server"]["peak_rss_bytes"] > 1 << 20
