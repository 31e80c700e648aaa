"""What a waiting device learns of, apart from the periodic search."""

import asyncio

from server.database.database import Database
from server.jobs.leases.endpoints import LongPoll
from server.jobs.leases.service import LeaseService
from server.web.state import Shutdown
from shared.protocol import LeaseRequest

NEVER = 3600.0  # seconds between two periodic searches


def test_a_job_that_becomes_ready_while_its_device_arrives_is_found(home, device, lease):
    database = Database(home.settings.url)  # apart from the server's, whose long poll would hear of the commit

    async def arrive():
        long_poll = LongPoll(database, Shutdown(), NEVER)
        long_poll.listen()
        with database.reading() as session:
            changes = long_poll.changes
            offer = LeaseService(session, 60).offer("default", device.device_id, LeaseRequest(datasets=["movies"]))
            (arrival,) = long_poll.arrivals(session, [offer], changes)
        assert not arrival.ready
        with database.writing() as session:
            LeaseService(session, 60).release(device.device_id, lease["id"])
        await asyncio.sleep(0.1)  # the event loop learns of the commit
        async with long_poll.waiting(offer, arrival) as waiter:
            return await long_poll.woken(waiter, 30)

    try:
        assert asyncio.run(arrive())
    finally:
        database.close()


def test_a_job_that_is_ready_when_its_device_arrives_wakes_it_without_another_search(home, device, lease):
    database = Database(home.settings.url)  # apart from the server's, whose long poll would hear of the commit

    async def arrive():
        long_poll = LongPoll(database, Shutdown(), NEVER)
        long_poll.listen()
        with database.writing() as session:
            LeaseService(session, 60).release(device.device_id, lease["id"])
        await asyncio.sleep(0.1)
        with database.reading() as session:
            changes = long_poll.changes
            offer = LeaseService(session, 60).offer("default", device.device_id, LeaseRequest(datasets=["movies"]))
            (arrival,) = long_poll.arrivals(session, [offer], changes)
        async with long_poll.waiting(offer, arrival) as waiter:
            return waiter.woken.done()

    try:
        assert asyncio.run(arrive())
    finally:
        database.close()
