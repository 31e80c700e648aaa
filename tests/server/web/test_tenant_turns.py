"""Tenants take turns at threads, writes and heavy work, whatever one of them asks for."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.jobs import events
from server.jobs.repository import JobRepository
from server.web import tenant_turns
from server.web.state import WRITERS, WriteQueue
from server.web.tenant_turns import Places, TenantTurns, current_tenant
from shared.errors import TooManyRequests
from tests.server.actors import job_request


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Work of tenants that ends when the test says so."""

    def __init__(self, places, **bounds):
        self.turns, self.began, self.tasks = TenantTurns(Places("x", places, **bounds)), [], {}

    async def begin(self, tenant, name):
        done = asyncio.Event()

        async def work():
            async with self.turns.turn(tenant):
                self.began.append(name)
                await done.wait()

        self.tasks[name] = asyncio.create_task(work()), done
        await settle()

    async def end(self, name):
        task, done = self.tasks.pop(name)
        done.set()
        await task
        await settle()

    async def cancel(self, name):
        task, _ = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle()


def test_one_tenant_leaves_a_place_to_the_others():
    async def scenario():
        work = Work(2)
        for number in range(4):
            await work.begin("a", f"a{number}")
        assert work.began == ["a0"]
        await work.begin("b", "b0")
        assert work.began == ["a0", "b0"]
        for name in ("b0", "a0", "a1", "a2", "a3"):
            await work.end(name)
        assert work.began == ["a0", "b0", "a1", "a2", "a3"]

    asyncio.run(scenario())


def test_the_tenants_of_the_last_seconds_have_equal_shares(monkeypatch):
    async def scenario():
        work = Work(8)
        await work.begin("b", "b0")
        await work.end("b0")  # b may come again at any time
        for number in range(4):
            await work.begin("a", f"a{number}")
        assert work.began == ["b0", "a0", "a1"]  # half of the places, shared by two
        monkeypatch.setattr(tenant_turns, "RECENT_SECONDS", -1.0)
        await work.begin("a", "a4")
        assert work.began == ["b0", "a0", "a1", "a2"]
        for number in range(5):
            await work.end(f"a{number}")

    asyncio.run(scenario())


def test_cancelled_work_keeps_no_place():
    async def scenario():
        work = Work(1)
        for name in ("a0", "a1", "b0"):
            await work.begin(name[0], name)
        await work.cancel("a1")
        await work.cancel("a0")
        assert work.began == ["a0", "b0"]
        await work.end("b0")
        await work.begin("a", "a2")
        await work.end("a2")

    asyncio.run(scenario())


def test_a_tenant_may_have_so_much_waiting_and_no_more():
    async def scenario():
        work = Work(1, most=2)
        for name in ("a0", "a1", "a2"):
            await work.begin("a", name)
        with pytest.raises(TooManyRequests):
            async with work.turns.turn("a"):
                pass
        await work.begin("b", "b0")
        for name in ("a0", "a1", "b0", "a2"):
            await work.end(name)

    asyncio.run(scenario())


def test_writes_of_tenants_take_turns(home):
    order, full, done = [], threading.Event(), threading.Event()
    places = 1 if home.database.engine.dialect.name == "sqlite" else WRITERS

    def work(name):
        order.append(name)
        if len(order) >= places:
            full.set()
        assert done.wait(60)

    async def scenario():
        queue = WriteQueue(home.database)

        async def write(tenant, number):
            current_tenant.set(tenant)
            await queue.run(work, f"{tenant}{number}")

        async def end():
            assert await asyncio.to_thread(full.wait, 60)
            done.set()

        await asyncio.gather(*(write("a", number) for number in range(20)), write("b", 0), end())

    asyncio.run(scenario())
    assert len(order) == 21
    assert order.index("b0") <= WRITERS  # in the order of arrival it would be the last


def test_requests_of_one_tenant_that_are_stuck_in_threads_leave_the_others_theirs(fleet, monkeypatch):
    stuck, page = threading.Event(), JobRepository.page

    def slow_page(self, tenant, *args):
        if tenant == "default":
            stuck.wait()
        return page(self, tenant, *args)

    monkeypatch.setattr(JobRepository, "page", slow_page)
    one, other = fleet.app(), fleet.app("other")
    with ThreadPoolExecutor(60) as pool:  # more than the server has threads
        try:
            answers = [pool.submit(lambda: one.get("/v1/jobs").status_code) for _ in range(60)]
            assert other.get("/v1/jobs", timeout=20).status_code == 200
            assert other.get("/v1/adapters", timeout=20).status_code == 200
        finally:
            stuck.set()
        assert {answer.result() for answer in answers} == {200}


def test_event_streams_that_are_stuck_leave_their_tenants_requests_the_threads(fleet, monkeypatch):
    began, stuck, read = threading.Event(), threading.Event(), events._read

    def slow_read(*args):
        began.set()
        stuck.wait()
        return read(*args)

    monkeypatch.setattr(events, "_read", slow_read)
    app = fleet.app()
    job = app.post("/v1/jobs", json=job_request()).json()["id"]

    def first_event(_):
        with app.stream("GET", f"/v1/jobs/{job}/events") as response:
            return next(response.iter_lines())

    with ThreadPoolExecutor(20) as pool:
        try:
            streams = [pool.submit(first_event, number) for number in range(20)]
            assert began.wait(20)
            assert app.get("/v1/jobs", timeout=20).status_code == 200
        finally:
            stuck.set()
        assert [stream.result() for stream in streams] == ["event: job"] * 20
