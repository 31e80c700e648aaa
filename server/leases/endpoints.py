"""Routes of leases: what a device does while it trains."""

from __future__ import annotations

import hashlib
import time

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from server.artifacts.store import StorageFull
from server.auth.guard import Device
from server.auth.service import Principal
from server.clock import utc_now
from server.devices.signatures import (
    ResultSignature,
    Signature,
    SignedResult,
    SignedWriting,
    check_digest,
    spend_ahead,
)
from server.http.bodies import check_binary_type, read_limited
from server.http.json_bodies import UnsupportedMediaType
from server.http.openapi import raises
from server.http.place import Here, Place
from server.http.problems import TooSlow
from server.http.routes import Routes
from server.leases import uploads
from server.leases.declines import DeclineService
from server.leases.repository import LeaseRepository
from server.leases.service import LeaseService
from server.leases.uploads import UploadService
from shared.errors import Conflict, Gone, InvalidUpload, Replayed, TooLarge
from shared.job import JobError, Progress
from shared.protocol import AdapterVersion, Completion, Decline, Lease, LeaseRequest, LeaseState, UploadReceipt

router = Routes(prefix="/v1/leases", tags=["leases"])


def _acquire(place: Place, principal: Principal, asked: LeaseRequest) -> Lease | None:
    with place.database.writing() as session:
        service = LeaseService(session, place.settings.lease_seconds)
        return service.acquire(principal.tenant, principal.device_id or "", asked.datasets, asked.memory_bytes)


def _may_be_work(place: Place, principal: Principal, asked: LeaseRequest) -> bool:
    with place.database.reading() as session:
        return LeaseRepository(session).may_be_work(
            principal.tenant, principal.device_id or "", asked.datasets, asked.memory_bytes, utc_now()
        )


@router.post("", response_model=Lease, responses={204: {"description": "no job for this device now"}})
async def acquire(
    principal: Device, lease_request: LeaseRequest, request: Request, here: Here, signature: Signature
) -> Lease | Response:
    """A job for this device: first the one it has, then one it had, then the oldest that waits and that it can hold.

    Holds the request up to `wait_seconds` until there is one; no thread waits meanwhile.
    """
    deadline = time.monotonic() + lease_request.wait_seconds
    lease = await run_in_threadpool(_acquire, here, principal, lease_request)
    with here.meters.polls.track_inprogress():
        while lease is None:
            left = deadline - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                return Response(status_code=204)
            if await here.closing.pause(min(left, here.settings.poll_seconds)):
                # A job given now would be one that this server can hardly tell of.
                return Response(status_code=204)
            if await run_in_threadpool(_may_be_work, here, principal, lease_request):
                lease = await run_in_threadpool(_acquire, here, principal, lease_request)
    return lease


@router.post("/{lease_id}/heartbeat", responses=raises(Gone))
def heartbeat(principal: Device, lease_id: str, progress: Progress, here: Here, session: SignedWriting) -> LeaseState:
    """Keeps the lease; `stop` tells that the job was cancelled. 410 once it is lost."""
    service = LeaseService(session, here.settings.lease_seconds)
    return service.heartbeat(principal.device_id or "", lease_id, progress)


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


@router.put(
    "/{lease_id}/adapter",
    responses=raises(Gone, InvalidUpload, Replayed, StorageFull, TooLarge, TooSlow, UnsupportedMediaType),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload(
    principal: Device, lease_id: str, request: Request, here: Here, signature: ResultSignature
) -> UploadReceipt:
    """The trained LoRA-B as a safetensors file of one float32 tensor `lora_B` of D elements, all finite."""
    check_binary_type(request.headers)
    service = UploadService(here.database, here.artifacts, here.settings.lease_seconds, here.settings.upload_rms_limit)
    device_id = principal.device_id or ""
    size, limit = await run_in_threadpool(service.limit, device_id, lease_id)
    await run_in_threadpool(spend_ahead, here, device_id, signature)
    digest = hashlib.sha256()
    data = await read_limited(request, limit, digest.update)
    check_digest(signature, digest.digest())
    return await run_in_threadpool(service.upload, device_id, lease_id, size, data)


@router.post("/{lease_id}/complete", responses=raises(Gone, Conflict))
def complete(
    principal: Device, lease_id: str, completion: Completion, here: Here, session: SignedResult
) -> AdapterVersion:
    """Makes the uploaded file the adapter's next version; the job has succeeded. Saying it twice is fine."""
    seconds = here.settings.lease_seconds
    return uploads.complete(session, seconds, principal.device_id or "", lease_id, completion)
