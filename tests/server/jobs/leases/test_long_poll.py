"""What a waiting device learns of, apart from the periodic search."""

import asyncio

import pytest

from server.database.database import Database
from server.jobs.leases.giving import LeaseGiving
from server.jobs.leases.long_poll import LongPoll
from server.jobs.leases.messages import JobPoll, Message, Parting
from server.jobs.leases.service import LeaseService
from server.web.state import Shutdown
from shared.protocol import LeaseRequest

NEVER = 3600.0  # seconds between two periodic searches


@pytest.fixture
def database(home):
    own = Database(home.settings.url)  # apart from the server's, whose long poll would hear of the commit
    yield own
    own.close()


def read_arrival(long_poll, database, device_id):
    with database.reading() as session:
        changes = long_poll.changes
        poll = JobPoll("default", device_id, LeaseRequest(datasets=["movies"]))
        (offer,) = LeaseGiving(session, 60).offers([poll])
        (arrival,) = long_poll.arrivals(session, [offer], changes)
    return arrival


async def release(database, device_id, lease):
    with database.writing() as session:
        LeaseService(session, 60).messages([Message(device_id, lease["id"], Parting.RELEASE)])
    await asyncio.sleep(0.1)  # the event loop learns of the commit


def test_a_job_that_becomes_ready_while_its_device_arrives_is_found(database, device, lease):
    async def arrive():
        long_poll = LongPoll(database, Shutdown(), NEVER)
        long_poll.listen()
        arrival = read_arrival(long_poll, database, device.device_id)
        assert not arrival.ready
        await release(database, device.device_id, lease)
        async with long_poll.waiting(arrival.offer, arrival) as waiter:
            return await long_poll.woken(waiter, 30)

    assert asyncio.run(arrive())


def test_a_job_that_is_ready_when_its_device_arrives_wakes_it_without_another_search(database, device, lease):
    async def arrive():
        long_poll = LongPoll(database, Shutdown(), NEVER)
        long_poll.listen()
        await release(database, device.device_id, lease)
        arrival = read_arrival(long_poll, database, device.device_id)
        async with long_poll.waiting(arrival.offer, arrival) as waiter:
            return waiter.woken.done()

    assert asyncio.run(arrive())
