"""Routes of leases that a device calls while it trains."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.write_queue import GroupCommit
from server.identity.access_rules import Device
from server.identity.activity import Presence, make_presences
from server.identity.devices.repository import DeviceReport
from server.identity.devices.signatures import Signature, SignedWriting, spent_by
from server.identity.tokens import Principal
from server.jobs.leases.declines import DeclineService
from server.jobs.leases.repository import LeaseRepository
from server.jobs.leases.service import Heartbeat, LeaseService
from server.jobs.scheduling.long_poll import LongPoll
from server.jobs.scheduling.matching import DeviceOffer
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, State
from shared.errors import Gone, Replayed
from shared.job import JobError, Progress
from shared.protocol import Decline, Lease, LeaseRequest, LeaseState

router = Routes(prefix="/v1/leases", tags=["leases"])


def make_long_poll(state: AppState) -> LongPoll:
    """Makes the long poll of devices that wait for a job. Overdue leases are taken back before each poll."""

    def take_back_overdue() -> None:
        with state.database.reading() as session:
            if not LeaseRepository(session).overdue(utc_now()):
                return
        with state.database.writing() as session:
            LeaseService(session, state.settings.lease_seconds, state.settings.lease_attempts).take_back_overdue()

    return LongPoll(state.database, state.shutdown, state.settings.look_seconds, take_back_overdue)


def make_heartbeats(state: AppState) -> GroupCommit[Heartbeat, LeaseState]:
    """Makes the group commit of heartbeats."""

    def write(session: Session, heartbeats: Sequence[Heartbeat]) -> list[LeaseState | Exception]:
        return LeaseService(session, state.settings.lease_seconds).heartbeats(heartbeats)

    return GroupCommit(state.database, state.write_queue, write)


def make_polls_gauge(registry: CollectorRegistry) -> Gauge:
    """Makes the gauge of open polls."""
    return Gauge("mobizo_polls_open", "Devices that wait here for a job", registry=registry)


def _offer(state: AppState, principal: Principal, lease_request: LeaseRequest) -> DeviceOffer:
    """Returns the device's offer to the queue."""
    with state.database.autocommit() as session:
        service = LeaseService(session, state.settings.lease_seconds)
        return service.offer(principal.tenant, principal.device_id or "", lease_request)


def _acquire(state: AppState, principal: Principal, lease_request: LeaseRequest) -> tuple[Lease | None, DeviceOffer]:
    """Returns a lease if there is a job for the device, and the device's current offer."""
    settings = state.settings
    requested = lease_request.lease_seconds
    seconds = None if requested is None else min(requested, settings.lease_seconds_most)
    with state.database.writing() as session:
        service = LeaseService(session, settings.lease_seconds, settings.lease_attempts)
        offer = service.offer(principal.tenant, principal.device_id or "", lease_request, lock=True)
        return service.acquire(offer, seconds), offer


@router.post("", response_model=Lease, responses={204: {"description": "no job for this device now"}})
async def acquire(
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
    await state.get(make_presences).record(Presence(principal.device_id or "", report))
    lease = None
    offer = await run_in_threadpool(_offer, state, principal, lease_request)
    if offer.may_hold:
        lease, offer = await state.write_queue.run(_acquire, state, principal, lease_request)
    long_poll = state.get(make_long_poll)
    with state.meters.part(make_polls_gauge).track_inprogress():
        while lease is None:
            async with long_poll.waiting(offer) as waiter:
                woken = await long_poll.woken(waiter, deadline - time.monotonic())
                # A server that stops grants no job, because its answer may not reach the device.
                if not woken or await request.is_disconnected():
                    return Response(status_code=204)
                lease, offer = await state.write_queue.run(_acquire, state, principal, lease_request)
    return lease


@router.post("/{lease_id}/heartbeat", responses=raises(Gone, Replayed))
async def heartbeat(
    principal: Device, lease_id: str, progress: Progress, state: State, signature: Signature
) -> LeaseState:
    """Extends the lease. `stop` is true if the job was cancelled. 410 once the lease is lost."""
    device_id = principal.device_id or ""
    await state.get(make_presences).record(Presence(device_id))
    spent = None if signature is None else spent_by(state, device_id, signature)
    return await state.get(make_heartbeats).add(Heartbeat(device_id, lease_id, progress, spent))


@router.post("/{lease_id}/leave", responses=raises(Gone))
def leave(principal: Device, lease_id: str, state: State, session: SignedWriting) -> LeaseState:
    """Announces that the device stops: the job goes to another device unless this one returns within seconds."""
    return LeaseService(session, state.settings.lease_seconds).leave(principal.device_id or "", lease_id)


@router.post("/{lease_id}/fail", responses=raises(Gone))
def fail(principal: Device, lease_id: str, error: JobError, state: State, session: SignedWriting) -> LeaseState:
    """Ends the job with an error that the device reports."""
    return LeaseService(session, state.settings.lease_seconds).fail(principal.device_id or "", lease_id, error)


@router.post("/{lease_id}/release", responses=raises(Gone))
def release(principal: Device, lease_id: str, state: State, session: SignedWriting) -> LeaseState:
    """Returns the job to the queue."""
    return LeaseService(session, state.settings.lease_seconds).release(principal.device_id or "", lease_id)


@router.post("/{lease_id}/decline", responses=raises(Gone))
def decline(principal: Device, lease_id: str, declined: Decline, state: State, session: SignedWriting) -> LeaseState:
    """Declines a job whose program needs more memory than the device has.

    A job that allows it (`shrink`) gets a smaller recipe, and one with estimator `auto` a smaller micro-batch or
    estimator `replay`. Otherwise it waits for another device, or fails if no other device may train it. Repeating the
    request changes nothing.
    """
    return DeclineService(session, state.settings.lease_seconds).decline(principal.device_id or "", lease_id, declined)
