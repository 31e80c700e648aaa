"""Pages of devices: who trains and why not, the token that lets a device in, and revoking one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from fastapi import Response
from pydantic import ValidationError
from sqlalchemy.orm import Session

from server.dashboard.access import Fields, signed_in
from server.dashboard.overview import ONLINE
from server.dashboard.pages import Visitor, duration, redirect
from server.dashboard.routes import PageRoutes
from server.database.columns import utc_now
from server.identity.devices.repository import BindingRepository, Device, DeviceRepository, is_cooling_down
from server.identity.devices.service import DeviceService, revoke_device
from server.jobs.leases.repository import LeaseRepository
from server.jobs.repository import Job
from server.web.pages import Paging
from server.web.state import Reading, Writing
from shared.access import Scope
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.protocol import EnrollmentRequest

router = PageRoutes(prefix="/ui/devices")
Reader = Annotated[Visitor, signed_in(Scope.DEVICES_READ)]
Writer = Annotated[Visitor, signed_in(Scope.DEVICES_WRITE)]


def device_status(device: Device, job: Job | None, users: Sequence[str]) -> tuple[str, str, str]:
    """Returns a device's state, the colour of the state, and why it does not train, or what it does."""
    if device.revoked_at is not None:
        return "revoked", "bad", "it was revoked and never gets a job again"
    if job is not None:
        why = job.progress.why if job.progress is not None else None
        if why is not None:
            return "waiting", "wait", why
        return "training", "busy", _progress(job)
    if is_cooling_down(device.cooldown_until):
        return "cooling down", "wait", f"{device.failures} jobs in a row failed on it"
    if device.last_seen_at is None or utc_now() - device.last_seen_at > ONLINE:
        return "offline", "none", "it has not asked for a job lately; is its agent running?"
    if not users:
        return "idle", "wait", "no user is bound to it"
    if device.report is None or not device.report.datasets:
        return "idle", "wait", "it reports no data set"
    return "idle", "good", "no job waits for it"


def device_names(session: Session, visitor: Visitor, ids: Iterable[str | None]) -> Mapping[str, str]:
    """Returns the names of the devices among `ids`, by id; none if the visitor may not see devices."""
    if not visitor.may(Scope.DEVICES_READ):
        return {}
    return DeviceRepository(session).names(visitor.principal.tenant, {each for each in ids if each is not None})


def _progress(job: Job) -> str:
    progress = job.progress
    if progress is None:
        return "it has just got a job"
    if not progress.steps:
        return progress.phase
    remaining = "" if progress.seconds_left is None else f", {duration(progress.seconds_left)} left"
    return f"step {progress.step} of {progress.steps}{remaining}"


@router.get("")
def devices(visitor: Reader, session: Reading, paging: Paging) -> Response:
    """The tenant's devices, newest first."""
    rows = DeviceRepository(session).page(visitor.principal.tenant, paging)
    ids = [device.id for device in rows.rows]
    users = BindingRepository(session).users_of(ids)
    jobs: Mapping[str, Job] = {}
    if visitor.may(Scope.JOBS_READ):
        jobs = LeaseRepository(session).jobs_of(ids)
    listing = paging.page(
        [
            (device.view(users[device.id]), device_status(device, jobs.get(device.id), users[device.id]))
            for device in rows.rows
        ],
        rows.before,
    )
    return visitor.page("devices.html", "Devices", listing=listing)


@router.get("/join")
def join(visitor: Writer) -> Response:
    """The form that makes a one-time token."""
    return visitor.page("join.html", "Let a device in", enrollment=None, users="")


@router.post("/join")
def invite(visitor: Writer, form: Fields, session: Writing) -> Response:
    """Makes a one-time token, as POST /v1/enrollments does, and shows the command that uses it."""
    users = form.get("users", "")
    names = [name for name in re.split(r"[\s,]+", users) if name]
    try:
        enrollment_request = EnrollmentRequest(users=names)
    except ValidationError as error:
        raise BadRequest(f"users: {first_invalid(error).message}") from error
    tenant, seconds = visitor.principal.tenant, enrollment_request.expires_in_seconds
    enrollment = DeviceService(session).invite(tenant, seconds, names, visitor.principal)
    return visitor.page("join.html", "Let a device in", enrollment=enrollment, users=users)


@router.get("/{device_id}")
def device(visitor: Reader, device_id: str, session: Reading) -> Response:
    """One device: what it reported, whose jobs it trains, and what it does."""
    tenant = visitor.principal.tenant
    enrolled = DeviceService(session).get(tenant, device_id)
    users = sorted(BindingRepository(session).users(enrolled.id))
    job = LeaseRepository(session).jobs_of([enrolled.id]).get(enrolled.id) if visitor.may(Scope.JOBS_READ) else None
    return visitor.page(
        "device.html",
        f"Device {enrolled.name}",
        device=enrolled.view(users),
        device_status=device_status(enrolled, job, users),
        job=None if job is None else job.summary(),
    )


@router.post("/{device_id}/revoke")
def revoke(visitor: Writer, form: Fields, device_id: str, session: Writing) -> Response:
    """Revokes a device, as POST /v1/devices/ID/revoke does; its jobs return to the queue."""
    revoked = revoke_device(session, visitor.principal.tenant, device_id, visitor.principal)
    return redirect(f"/ui/devices/{revoked.id}", "device-revoked")
