"""Routes of leases that a device calls: one for a job, one for each message while it trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from fastapi import Request, Response
from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.access_rules import Device, Signature, spend_ahead, spent_nonce, write_signed
from server.identity.devices.repository import DeviceReport, DeviceRepository
from server.identity.tokens import DevicePrincipal
from server.jobs.leases.declines import DeclineService
from server.jobs.leases.giving import Answer, LeaseGiving
from server.jobs.leases.long_poll import Arrival, make_long_poll
from server.jobs.leases.messages import JobPoll, Message, Parting, Report
from server.jobs.leases.service import LeaseService
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, Group, State, group_commit, group_read
from shared.errors import Conflict, Gone, MobizoError, ReplayedRequest, Unavailable
from shared.job import JobError, Progress
from shared.protocol import ChosenStart, Decline, Lease, LeaseRequest, LeaseState
from shared.request_signature import RequestSignature

router = Routes(prefix="/v1/leases", tags=["leases"])
MAX_ACQUIRED = 20  # leases that are given in one transaction, for which heartbeats wait on SQLite
NOTE_SECONDS = 60.0  # between two writes of when a device was seen


class Presences:
    """Records when devices were last seen and what they reported: once a minute for each, many in one transaction.

    A crash loses at most the last minute. Use it only in the thread of the event loop.
    """

    def __init__(self, state: AppState) -> None:
        self._writes = group_commit(state.write_queue, _record)
        # When this process last wrote each device, what lasts of its report, and that report.
        self._noted: dict[str, tuple[float, DeviceReport | None, DeviceReport | None]] = {}

    async def record(self, device_id: str, report: DeviceReport | None = None) -> None:
        """Records that a device is online, unless that was recorded a moment ago. report: what it reported, if so."""
        now = time.monotonic()
        at, noted, latest = self._noted.get(device_id, (-NOTE_SECONDS, None, None))
        lasting = noted
        if report is not None and report != latest:
            latest, lasting = report, report.lasting()
        if now - at < NOTE_SECONDS and lasting == noted:
            return
        self._noted[device_id] = now, lasting, latest
        await self._writes.add((device_id, report))


def _record(session: Session, presences: Sequence[tuple[str, DeviceReport | None]]) -> list[None]:
    reports: dict[str, DeviceReport | None] = {}
    for device_id, report in presences:
        reports[device_id] = report or reports.get(device_id)
    DeviceRepository(session).record_presences(reports, utc_now())
    return [None] * len(presences)


def make_messages(state: AppState) -> Group[Message, LeaseState]:
    """Makes the group commit of messages about leases."""

    def write(session: Session, messages: Sequence[Message]) -> list[LeaseState | Exception]:
        return LeaseService(session, state.settings.lease_seconds).messages(messages)

    return group_commit(state.write_queue, write)


async def _process(
    state: AppState,
    principal: DevicePrincipal,
    lease_id: str,
    says: Report,
    signature: RequestSignature | None,
) -> LeaseState:
    """Processes a message together with others. It spends the nonce of its signature also if it is refused."""
    device_id = principal.device_id
    nonce = None if signature is None else spent_nonce(device_id, signature)
    try:
        return await state.get(make_messages).add(Message(device_id, lease_id, says, nonce))
    except (ReplayedRequest, Unavailable):
        raise
    except MobizoError:
        # A message that was refused after changes was rolled back together with its nonce.
        with suppress(ReplayedRequest):
            await state.write_queue.run(spend_ahead, state, device_id, signature)
        raise


def make_polls_gauge(registry: CollectorRegistry) -> Gauge:
    """Makes the gauge of open polls."""
    return Gauge("mobizo_polls_open", "Devices that wait here for a job", registry=registry)


def make_arrivals(state: AppState) -> Group[JobPoll, Arrival]:
    """Makes the reads of what decides which jobs a device may get, and of the jobs that are ready."""
    long_poll = state.get(make_long_poll)

    def read(session: Session, polls: Sequence[JobPoll]) -> list[Arrival | Exception]:
        return long_poll.arrivals(session, LeaseGiving(session, state.settings.lease_seconds).offers(polls))

    return group_read(state.database, read)


def make_acquisitions(state: AppState) -> Group[JobPoll, Answer]:
    """Makes the group commit of leases that are given."""

    def write(session: Session, polls: Sequence[JobPoll]) -> list[Answer | Exception]:
        settings = state.settings
        return LeaseGiving(session, settings.lease_seconds, settings.reference_texts).acquire_each(polls)

    return group_commit(state.write_queue, write, MAX_ACQUIRED)


@router.post("", response_model=Lease, responses={204: {"description": "no job for this device now"}})
async def acquire_lease(
    principal: Device, lease_request: LeaseRequest, request: Request, state: State, signature: Signature
) -> Lease | Response:
    """Leases a job to the device: the one it has, else the one it had, else the first in the queue that it may train.

    Waits up to `wait_seconds` for a job, without occupying a thread. 204 if there is none.
    """
    deadline = time.monotonic() + lease_request.wait_seconds
    report = DeviceReport(
        datasets=tuple(lease_request.datasets),
        memory_bytes=lease_request.memory_bytes,
        capabilities=lease_request.capabilities,
    )
    await state.get(Presences).record(principal.device_id, report)
    lease = None
    poll = JobPoll(principal.tenant, principal.device_id, lease_request)
    long_poll = state.get(make_long_poll)
    found = await state.get(make_arrivals).add(poll)
    offer, ready = found.offer, found.ready
    if offer.may_hold:
        lease, offer = await state.get(make_acquisitions).add(poll)
    with state.meters.part(make_polls_gauge).track_inprogress():
        while lease is None:
            async with long_poll.waiting(offer, ready) as waiter:
                ready, at_once = (), waiter.woken.done()
                woken = await long_poll.woken(waiter, deadline - time.monotonic())
                # A server that stops grants no job, because its answer may not reach the device.
                if not woken or (not at_once and await request.is_disconnected()):
                    return Response(status_code=204)
                lease, offer = await state.get(make_acquisitions).add(poll)
    return lease


@router.post("/{lease_id}/heartbeat", responses=raises(Gone, ReplayedRequest))
async def renew_lease(
    principal: Device, lease_id: str, progress: Progress, state: State, signature: Signature
) -> LeaseState:
    """Extends the lease. `stop` is true if the job was cancelled. 410 once the lease is lost."""
    await state.get(Presences).record(principal.device_id)
    return await _process(state, principal, lease_id, progress, signature)


@router.post("/{lease_id}/start", responses=raises(Conflict, Gone, ReplayedRequest))
async def choose_start(
    principal: Device, lease_id: str, chosen: ChosenStart, state: State, signature: Signature
) -> LeaseState:
    """Reports the start that the device has chosen for a job with start `auto`. The job's `start` is then this version.

    404 if the version is not among the lease's `starts`, for example because it was deleted: ask for the lease
    again and choose anew.
    """
    return await _process(state, principal, lease_id, chosen, signature)


@router.post("/{lease_id}/leave", responses=raises(Gone, ReplayedRequest))
async def leave_lease(principal: Device, lease_id: str, state: State, signature: Signature) -> LeaseState:
    """Announces that the device stops: the job goes to another device unless this one returns within seconds."""
    return await _process(state, principal, lease_id, Parting.LEAVE, signature)


@router.post("/{lease_id}/fail", responses=raises(Gone, ReplayedRequest))
async def fail_lease(
    principal: Device, lease_id: str, error: JobError, state: State, signature: Signature
) -> LeaseState:
    """Ends the job with an error that the device reports."""
    return await _process(state, principal, lease_id, error, signature)


@router.post("/{lease_id}/release", responses=raises(Gone, ReplayedRequest))
async def release_lease(principal: Device, lease_id: str, state: State, signature: Signature) -> LeaseState:
    """Returns the job to the queue."""
    return await _process(state, principal, lease_id, Parting.RELEASE, signature)


@router.post("/{lease_id}/decline", responses=raises(Gone, ReplayedRequest))
async def decline_lease(
    principal: Device, lease_id: str, declined: Decline, state: State, signature: Signature
) -> LeaseState:
    """Declines a job whose program needs more memory than the device has.

    A job with estimator `auto` gets a smaller micro-batch or estimator `replay`. Otherwise it waits for another device,
    or fails if no other device may train it. Repeating the request changes nothing.
    """

    def write(session: Session) -> LeaseState:
        return DeclineService(session, state.settings.lease_seconds).decline(principal.device_id, lease_id, declined)

    return await write_signed(state, principal, signature, write)
