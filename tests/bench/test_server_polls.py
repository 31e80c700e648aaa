"""The bench of polls, in the small: its home serves, and its clients are understood."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from bench.poll_clients import Connection, Device, Notes, Orders
from bench.server_home import DATASET, fill, request, running
from bench.server_polls import peak_rss, spread
from server.settings import Settings


def test_spread():
    figures = spread([0.001 * number for number in range(1, 101)])
    assert figures["count"] == 100
    assert figures["p50_ms"] == pytest.approx(50.5)
    assert figures["max_ms"] == pytest.approx(100)


async def play(orders, notes):
    app = Connection(orders, orders.app)
    status, _ = await app.ask("POST", "/v1/jobs", json.dumps(orders.jobs[0]).encode())
    assert status == 202
    app.close()
    device = Device(orders, 0, notes)
    notes.submitted[orders.jobs[0]["adapter"]] = 0.0
    work = asyncio.create_task(device.work())
    while not notes.seconds["completion"]:
        assert not work.done(), notes.errors
        await asyncio.sleep(0.02)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await asyncio.sleep(0.01)  # for the sockets to be closed


def test_a_device_sees_a_job_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.poll_clients.BEAT_SECONDS", 0.01)
    settings = Settings(home=tmp_path / "home")
    app, devices = fill(settings, 1)
    notes = Notes()
    with running(settings) as (url, server):
        place = urlsplit(url)
        orders = Orders(
            host=place.hostname,
            port=place.port,
            rate=1,
            dataset=DATASET,
            app=app,
            jobs=[request(0).model_dump(mode="json")],
            devices=[(devices[0].token, devices[0].key)],
        )
        asyncio.run(play(orders, notes))
        assert peak_rss(server.pid) > 1 << 20
    assert notes.errors == []
    assert len(notes.seconds["heartbeat"]) == 2
