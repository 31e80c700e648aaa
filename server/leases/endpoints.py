"""Routes of leases: what a device does while it trains."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from server.adapters import files
from server.artifacts.naming import Collected
from server.artifacts.store import StorageFull
from server.auth.guard import Device
from server.auth.service import Principal
from server.devices.models import Told
from server.devices.presence import Presence
from server.devices.signatures import (
    ResultSignature,
    Signature,
    SignedWriting,
    WholeResultSignature,
    check_digest,
    spending,
    spent_by,
)
from server.history.intake import TrajectoryIntake
from server.history.proof import ProofService
from server.history.recording import Proof
from server.http.bodies import check_binary_type, read_limited
from server.http.json_bodies import UnsupportedMediaType
from server.http.openapi import raises
from server.http.place import Here, Place
from server.http.problems import TooSlow
from server.http.ranges import FILE_ROUTE, file_response
from server.http.routes import Routes
from server.leases import uploads
from server.leases.declines import DeclineService
from server.leases.service import Beat, LeaseService
from server.leases.uploads import UploadService
from server.queue.matching import Asking
from shared.cohort import RoundReceipt
from shared.errors import (
    CohortMismatch,
    Conflict,
    Gone,
    InvalidTrajectory,
    InvalidUpdate,
    InvalidUpload,
    NotAMember,
    NotReplayable,
    Replayed,
    RoundClosed,
    StartDeleted,
    TooLarge,
    TrajectoryMismatch,
)
from shared.job import JobError, Progress
from shared.protocol import AdapterVersion, Completion, Decline, Lease, LeaseRequest, LeaseState, UploadReceipt

router = Routes(prefix="/v1/leases", tags=["leases"])
START_FILE = FILE_ROUTE | {"responses": FILE_ROUTE["responses"] | raises(Gone, StartDeleted)}


def _look(place: Place, principal: Principal, asked: LeaseRequest) -> Asking:
    """The device as the queue sees it."""
    with place.database.glancing() as session:
        service = LeaseService(session, place.settings.lease_seconds)
        return service.asking(principal.tenant, principal.device_id or "", asked)


def _acquire(place: Place, principal: Principal, asked: LeaseRequest) -> tuple[Lease | None, Asking]:
    """A job if there is one, and the device as the queue sees it."""
    settings = place.settings
    seconds = None if asked.lease_seconds is None else min(asked.lease_seconds, settings.lease_seconds_most)
    with place.database.writing() as session:
        service = LeaseService(session, settings.lease_seconds, settings.lease_attempts)
        asking = service.asking(principal.tenant, principal.device_id or "", asked, lock=True)
        return service.acquire(asking, seconds), asking


@router.post("", response_model=Lease, responses={204: {"description": "no job for this device now"}})
async def acquire(
    principal: Device, lease_request: LeaseRequest, request: Request, here: Here, signature: Signature
) -> Lease | Response:
    """A job for this device: first the one it has, then one it had, then the first in the queue that it may train.

    Holds the request up to `wait_seconds` until there is one; no thread waits meanwhile.
    """
    deadline = time.monotonic() + lease_request.wait_seconds
    told = Told(
        datasets=tuple(lease_request.datasets),
        memory_bytes=lease_request.memory_bytes,
        capabilities=lease_request.capabilities,
    )
    await here.present(Presence(principal.device_id or "", told))
    lease = None
    asking = await run_in_threadpool(_look, here, principal, lease_request)
    if asking.may_hold:
        lease, asking = await here.turns.run(_acquire, here, principal, lease_request)
    with here.meters.polls.track_inprogress():
        while lease is None:
            async with here.room.waiting(asking) as waiter:
                called = await here.room.called(waiter, deadline - time.monotonic())
                # A job given when the server stops would be one that it can hardly tell of.
                if not called or await request.is_disconnected():
                    return Response(status_code=204)
                lease, asking = await here.turns.run(_acquire, here, principal, lease_request)
    return lease


@router.post("/{lease_id}/heartbeat", responses=raises(Gone, Replayed))
async def heartbeat(
    principal: Device, lease_id: str, progress: Progress, here: Here, signature: Signature
) -> LeaseState:
    """Keeps the lease; `stop` tells that the job was cancelled. 410 once it is lost."""
    device_id = principal.device_id or ""
    await here.present(Presence(device_id))
    spent = None if signature is None else spent_by(here, device_id, signature)
    return await here.beats.add(Beat(device_id, lease_id, progress, spent))


@router.post("/{lease_id}/leave", responses=raises(Gone))
def leave(principal: Device, lease_id: str, here: Here, session: SignedWriting) -> LeaseState:
    """The device stops: unless it is back within seconds, the job is another's."""
    return LeaseService(session, here.settings.lease_seconds).leave(principal.device_id or "", lease_id)


@router.post("/{lease_id}/fail", responses=raises(Gone))
def fail(principal: Device, lease_id: str, error: JobError, here: Here, session: SignedWriting) -> LeaseState:
    """The job cannot be trained here, and why; it fails."""
    return LeaseService(session, here.settings.lease_seconds).fail(principal.device_id or "", lease_id, error)


@router.post("/{lease_id}/release", responses=raises(Gone))
def release(principal: Device, lease_id: str, here: Here, session: SignedWriting) -> LeaseState:
    """Gives the job back; it waits for a device again."""
    return LeaseService(session, here.settings.lease_seconds).release(principal.device_id or "", lease_id)


@router.post("/{lease_id}/decline", responses=raises(Gone))
def decline(principal: Device, lease_id: str, declined: Decline, here: Here, session: SignedWriting) -> LeaseState:
    """The device has too little memory for the program.

    A job that allows it (`shrink`) gets a smaller recipe; else it waits for another device, or fails if no other may
    train it. Saying it twice is fine.
    """
    return DeclineService(session, here.settings.lease_seconds).decline(principal.device_id or "", lease_id, declined)


_UPLOADED = Gone, Collected, Replayed, StorageFull, TooLarge, TooSlow, UnsupportedMediaType  # what may become of bytes
BYTES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.head("/{lease_id}/start", include_in_schema=False)
@router.get("/{lease_id}/start", **START_FILE)
def start(principal: Device, lease_id: str, request: Request, here: Here) -> Response:
    """The LoRA-B that the leased job goes on from, for the device that holds the lease alone; takes Range."""
    with here.database.reading() as session:
        version = LeaseService(session, here.settings.lease_seconds).start(principal.device_id or "", lease_id)
        session.expunge_all()
    found = files.find(here.database, here.artifacts, version, files.RAW)
    return file_response(request, here.artifacts, found.sha256, found.path)


@router.put(
    "/{lease_id}/adapter",
    responses=raises(InvalidUpload, CohortMismatch, InvalidUpdate, RoundClosed, NotAMember, *_UPLOADED),
    openapi_extra=BYTES,
)
async def upload(
    principal: Device, lease_id: str, request: Request, here: Here, signature: ResultSignature
) -> UploadReceipt:
    """The trained LoRA-B as a safetensors file of one float32 tensor `lora_B` of D elements, all finite."""
    check_binary_type(request.headers)
    service = UploadService(here.database, here.artifacts, here.settings.lease_seconds, here.settings.upload_rms_limit)
    device_id = principal.device_id or ""
    async with here.turns.holding(spending(here, principal, signature)) as session:
        size, limit = await run_in_threadpool(service.limit, session, device_id, lease_id)
    digest = hashlib.sha256()
    data = await read_limited(request, limit, digest.update)
    check_digest(signature, digest.digest())
    return await here.turns.run(service.upload, device_id, lease_id, size, data)


@router.put("/{lease_id}/trajectory", responses=raises(InvalidTrajectory, *_UPLOADED), openapi_extra=BYTES)
async def upload_trajectory(
    principal: Device, lease_id: str, request: Request, here: Here, signature: ResultSignature
) -> UploadReceipt:
    """The trajectory of the run, whole and of this job; sent only where the device's owner allows it."""
    check_binary_type(request.headers)
    intake = TrajectoryIntake(here.database, here.artifacts, here.settings)
    device_id = principal.device_id or ""
    async with here.turns.holding(spending(here, principal, signature)) as session:
        expected = await run_in_threadpool(intake.expect, session, device_id, lease_id)
    digest = hashlib.sha256()
    data = await read_limited(request, expected.limit, digest.update)
    check_digest(signature, digest.digest())
    await run_in_threadpool(intake.check, expected, data)
    return await here.turns.run(intake.store, device_id, lease_id, data)


@router.post(
    "/{lease_id}/complete",
    responses=raises(
        *(Gone, Conflict, Replayed, InvalidTrajectory, NotReplayable, TrajectoryMismatch),
        *(RoundClosed, NotAMember, InvalidUpdate),
    ),
)
async def complete(
    principal: Device, lease_id: str, completion: Completion, here: Here, signature: WholeResultSignature
) -> AdapterVersion | RoundReceipt:
    """Makes the uploaded file the adapter's next version; the job has succeeded. Saying it twice is fine.

    Of a job that is a member's part in a cohort's round, it counts in the round instead.

    A trajectory that is named is replayed first, for seconds; if it does not yield that file, nothing has happened.
    """
    device_id = principal.device_id or ""
    proof = await _proof(here, device_id, lease_id, completion)
    async with here.turns.holding(spending(here, principal, signature)) as session:
        return await run_in_threadpool(uploads.complete, session, here.settings, device_id, lease_id, completion, proof)


async def _proof(here: Place, device_id: str, lease_id: str, completion: Completion) -> Proof | None:
    """Of the trajectory that a completion names, if it does. The replay is no transaction's, and keeps no turn."""
    if completion.trajectory_sha256 is None:
        return None
    service = ProofService(here.database, here.artifacts, here.settings)
    claim = await here.turns.run(service.begin, device_id, lease_id, completion)
    if claim is None:
        return None
    proof = await run_in_threadpool(service.prove, claim)
    if proof.made is not None:
        await here.turns.run(service.keep, claim, proof.made)
    return proof
