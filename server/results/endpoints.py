"""Routes of leases by which a device downloads the start of its run and uploads its results."""

from __future__ import annotations

import hashlib

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from server.identity.access_rules import Device, ResultSignature, WholeResultSignature, check_digest, spending
from server.jobs.leases.service import LeaseService
from server.registry import files
from server.registry.trajectories.service import Proof
from server.registry.warm_start import StartService
from server.results import uploads
from server.results.trajectories import TrajectoryProofs, TrajectoryUploads
from server.results.uploads import AdapterUploads
from server.storage.store import Collected, StorageFull
from server.web.bodies import BYTES, UnsupportedMediaType, check_binary_type, read_limited
from server.web.downloads import FILE_ROUTE, file_response
from server.web.middleware import TooSlow
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, State, make_uploaders
from shared.errors import (
    CohortMismatch,
    Conflict,
    Gone,
    InvalidTrajectory,
    InvalidUpdate,
    InvalidUpload,
    NotAMember,
    NotReplayable,
    ReplayedRequest,
    RoundClosed,
    StartDeleted,
    TooLarge,
    TrajectoryMismatch,
)
from shared.federation.cohort import RoundReceipt
from shared.protocol import AdapterVersion, Completion, UploadReceipt

router = Routes(prefix="/v1/leases", tags=["leases"])
START_FILE = FILE_ROUTE | {"responses": FILE_ROUTE["responses"] | raises(Gone, StartDeleted)}


READERS = 2  # threads that read trajectories at the same time


def _make_readers(state: AppState) -> CapacityLimiter:
    return CapacityLimiter(READERS)


def _uploads(state: AppState) -> AdapterUploads:
    return AdapterUploads(state.database, state.artifacts, state.settings.lease_seconds)


async def _upload(state: AppState, device_id: str, lease_id: str, size: int, data: bytes) -> UploadReceipt:
    """Stores an adapter file, then records it under its lease."""
    service = _uploads(state)
    limiter = state.get(make_uploaders)
    upload = await anyio.to_thread.run_sync(service.store, device_id, lease_id, size, data, limiter=limiter)
    return await state.write_queue.run(service.record, device_id, lease_id, upload)


# Errors of every upload.
_UPLOADED = (Gone, Collected, ReplayedRequest, StorageFull, TooLarge, TooSlow, UnsupportedMediaType)


@router.head("/{lease_id}/start", include_in_schema=False)
@router.get("/{lease_id}/start", **START_FILE)
def start(principal: Device, lease_id: str, request: Request, state: State) -> Response:
    """Downloads the LoRA-B that the leased job continues; only for the device with the lease. Supports Range."""
    with state.database.reading() as session:
        leases = LeaseService(session, state.settings.lease_seconds)
        version = StartService(session).file(leases.job_unlocked(principal.device_id, lease_id))
        session.expunge_all()
    file = files.find(state, version, files.RAW)
    return file_response(request, state.artifacts, file.sha256, file.path)


@router.put(
    "/{lease_id}/adapter",
    responses=raises(InvalidUpload, CohortMismatch, InvalidUpdate, RoundClosed, NotAMember, *_UPLOADED),
    openapi_extra=BYTES,
)
async def upload(
    principal: Device, lease_id: str, request: Request, state: State, signature: ResultSignature
) -> UploadReceipt:
    """Uploads the trained LoRA-B: a safetensors file with one float32 tensor `lora_B` of D finite elements."""
    check_binary_type(request.headers)
    service = _uploads(state)
    device_id = principal.device_id
    async with state.write_queue.holding(spending(state, principal, signature)) as session:
        size, limit = await run_in_threadpool(service.limit, session, device_id, lease_id)
    digest = hashlib.sha256()
    data = await read_limited(request, limit, digest.update)
    check_digest(signature, digest.digest())
    return await _upload(state, device_id, lease_id, size, data)


@router.put("/{lease_id}/trajectory", responses=raises(InvalidTrajectory, *_UPLOADED), openapi_extra=BYTES)
async def upload_trajectory(
    principal: Device, lease_id: str, request: Request, state: State, signature: ResultSignature
) -> UploadReceipt:
    """Uploads the complete trajectory of the run, which a device sends only if its owner allows it."""
    check_binary_type(request.headers)
    trajectories = TrajectoryUploads(state.database, state.artifacts, state.settings)
    device_id = principal.device_id
    async with state.write_queue.holding(spending(state, principal, signature)) as session:
        expected = await run_in_threadpool(trajectories.expect, session, device_id, lease_id)
    digest = hashlib.sha256()
    data = await read_limited(request, expected.limit, digest.update)
    check_digest(signature, digest.digest())
    await anyio.to_thread.run_sync(trajectories.check, expected, data, limiter=state.get(_make_readers))
    sha256 = await anyio.to_thread.run_sync(state.artifacts.put, data, limiter=state.get(make_uploaders))
    receipt = UploadReceipt(sha256=sha256, size=len(data))
    return await state.write_queue.run(trajectories.record, device_id, lease_id, receipt)


@router.post(
    "/{lease_id}/complete",
    responses=raises(
        *(Gone, Conflict, ReplayedRequest, InvalidTrajectory, NotReplayable, TrajectoryMismatch),
        *(RoundClosed, NotAMember, InvalidUpdate),
    ),
)
async def complete(
    principal: Device, lease_id: str, completion: Completion, state: State, signature: WholeResultSignature
) -> AdapterVersion | RoundReceipt:
    """Publishes the uploaded file as the adapter's next version and ends the job. A repeated request changes nothing.

    If the job belongs to a cohort's round, the file counts in the round instead. A trajectory that the completion names
    is replayed first, which takes seconds; if it does not yield the file, nothing changes.
    """
    device_id = principal.device_id
    proof = await _proof(state, device_id, lease_id, completion)
    async with state.write_queue.holding(spending(state, principal, signature)) as session:
        return await run_in_threadpool(
            uploads.complete, session, state.settings, device_id, lease_id, completion, proof
        )


async def _proof(state: AppState, device_id: str, lease_id: str, completion: Completion) -> Proof | None:
    """Returns the proof of the trajectory that a completion names, if any. The replay runs outside of transactions."""
    if completion.trajectory_sha256 is None:
        return None
    service = TrajectoryProofs(state.database, state.artifacts, state.settings)
    proof_request = await state.write_queue.run(service.begin, device_id, lease_id, completion)
    if proof_request is None:
        return None
    proof = await run_in_threadpool(service.prove, proof_request)
    if proof.rebuilt is not None:
        await _upload(state, device_id, lease_id, proof_request.manifest.size, proof.rebuilt)
    return proof
