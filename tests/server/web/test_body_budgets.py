"""The bytes of bodies that a process holds are bounded, in memory and in staging files, and none buys idle time."""

import asyncio
from contextlib import ExitStack
from itertools import count

import anyio
import pytest

from server.web.body_budgets import ByteBudget, make_body_memory, make_upload_space
from server.web.middleware import PacedBody
from shared.errors import TooManyRequests, TooSlow
from tests.server.actors import adapter_bytes, job_request
from tests.server.homes import eventually
from tests.server.web.test_bodies import JSON, Link

DATABASES = ("sqlite",)
PATIENCE = 20


def test_bytes_that_arrived_buy_no_idle_time():
    """16 MiB at once would have paid for an hour of silence."""
    sent = [{"body": bytes(16 << 20), "more_body": True}]

    async def receive():
        if not sent:
            await asyncio.Event().wait()
        return sent.pop()

    async def read():
        body = PacedBody(receive, 0.05)
        await body.receive()
        with anyio.fail_after(PATIENCE), pytest.raises(TooSlow):
            await body.receive()

    asyncio.run(read())


def most(take):
    """Takes bytes until the budget refuses; returns how many it took."""
    for taken in count():
        try:
            take(1)
        except TooManyRequests:
            return taken
    raise AssertionError("unreachable")


def test_a_tenant_holds_half_and_a_token_a_quarter():
    budget = ByteBudget("x", 800)
    with ExitStack() as stack:
        taken = [most(stack.enter_context(budget.share("a", str(token)))) for token in range(100)]
        assert taken[0] == 200
        assert 380 <= sum(taken) == budget.held <= 400
    assert budget.held == 0
    with budget.share("a", "1") as again:
        assert most(again) == 200


def test_tenants_that_hold_all_they_can_leave_room_for_others():
    budget = ByteBudget("x", 6_400)
    with ExitStack() as stack:
        for tenant in range(6):
            taken = [most(stack.enter_context(budget.share(str(tenant), str(token)))) for token in range(50)]
            assert taken[0] >= 6_400 // 2 ** (tenant + 2)
        assert budget.held < 6_400


def test_bodies_held_open_are_bounded_by_token(fleet, standing, app, problem, monkeypatch):
    monkeypatch.setattr("server.web.body_budgets.MEMORY_BYTES", 400_000)
    budget = standing[0].state.mobizo.get(make_body_memory)
    with Link(fleet.url, app.token) as link:
        link.head("POST", "/v1/jobs", JSON, "Content-Length: 90000")
        link.send(b" " * 80_000)
        eventually(lambda: budget.held == 90_000)
        large = job_request() | {"x": " " * 30_000}
        refused = problem(app.post("/v1/jobs", json=large), 429, "too-many-requests")
        assert refused["limit"] == "body-memory"
        assert fleet.app().post("/v1/jobs", json=large).status_code == 422
        assert app.post("/v1/jobs", json=job_request()).status_code == 202
    eventually(lambda: budget.held == 0)


def test_uploads_are_written_to_the_disk_as_they_arrive(fleet, standing, device, lease, monkeypatch):
    state = standing[0].state.mobizo
    staging = fleet.home.settings.artifacts_path / "staging"
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    address = f"/v1/leases/{lease['id']}/adapter"
    signed = device.build_request("PUT", address, content=data)
    signed.headers.update(device.signer.headers("PUT", address, "", data))
    names = ("signature", "signature-input", "content-digest", "content-type", "content-length")
    with Link(fleet.url, device.token) as link:
        link.head("PUT", address, *(f"{name}: {signed.headers[name]}" for name in names if name in signed.headers))
        link.send(data[:-1])
        eventually(lambda: sum(path.stat().st_size for path in staging.glob("*/file")) == len(data) - 1)
        assert state.get(make_upload_space).held == len(data) - 1
        assert state.get(make_body_memory).held == 0
        link.send(data[-1:])
        assert link.answer()[0] == 200
    assert list(staging.iterdir()) == []
    assert state.get(make_upload_space).held == 0
