"""Routes of leases by which a device downloads the start of its run and uploads its results."""

from __future__ import annotations

from typing import Literal

from fastapi import Request, Response
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from server.identity.access_rules import Device, ResultSignature, WholeResultSignature, check_digest, write_signed
from server.identity.tokens import DevicePrincipal
from server.jobs.leases.service import LeaseService
from server.registry import files
from server.registry.trajectories.reconstruction import REPLAYS
from server.registry.trajectories.service import Proof
from server.registry.warm_start import StartService
from server.results import uploads
from server.results.trajectories import Trajectories
from server.results.uploads import ExpectedAdapter, check_adapter, expect_adapter, record_upload
from server.storage.store import Collected, StagingFile, StorageFull
from server.web.bodies import BYTES, UnsupportedMediaType, check_binary_type
from server.web.body_budgets import UPLOADERS, remove_unreferenced, staged_body, stored
from server.web.downloads import FILE_ROUTE, file_response
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, State
from server.web.tenant_turns import Places
from shared.errors import (
    CohortMismatch,
    Conflict,
    Gone,
    InvalidTrajectory,
    InvalidUpdate,
    InvalidUpload,
    NotAMember,
    NotReplayable,
    QuotaExceeded,
    ReplayedRequest,
    RoundClosed,
    StartDeleted,
    TooLarge,
    TooSlow,
    TrajectoryMismatch,
)
from shared.federation.cohort import RoundReceipt
from shared.protocol import AdapterVersion, Completion, UploadReceipt

router = Routes(prefix="/v1/leases", tags=["leases"])
START_FILE = FILE_ROUTE | {"responses": FILE_ROUTE["responses"] | raises(Gone, StartDeleted)}


READERS = Places("trajectories", 3)  # threads that read trajectories, two of them for one tenant
REPLAYERS = Places("replays", REPLAYS)


async def _upload(
    state: AppState, principal: DevicePrincipal, lease_id: str, expected: ExpectedAdapter, staged: StagingFile
) -> UploadReceipt:
    """Checks an adapter file, and then as `_record`."""
    norm = await state.get(UPLOADERS.make).run(principal.tenant, check_adapter, state.artifacts, expected, staged)
    return await _record(state, principal, lease_id, staged, "upload", norm)


async def _record(
    state: AppState,
    principal: DevicePrincipal,
    lease_id: str,
    staged: StagingFile,
    kind: Literal["upload", "trajectory"],
    norm: float | None = None,
) -> UploadReceipt:
    """Stores a checked file, records it under its lease, and removes the file that it replaces."""
    receipt, device_id = UploadReceipt(sha256=staged.sha256, size=staged.size), principal.device_id
    async with stored(state, principal.tenant, staged):
        replaced = await state.write_queue.transact(
            lambda session: record_upload(session, state, device_id, lease_id, receipt, kind, norm)
        )
    await remove_unreferenced(state, principal.tenant, replaced)
    return receipt


# Errors of every upload.
_UPLOADED = (Gone, Collected, ReplayedRequest, StorageFull, TooLarge, TooSlow, UnsupportedMediaType)


@router.head("/{lease_id}/start", include_in_schema=False)
@router.get("/{lease_id}/start", **START_FILE)
def download_start(principal: Device, lease_id: str, request: Request, state: State) -> Response:
    """Downloads the LoRA-B that the leased job continues; only for the device with the lease. Supports Range."""
    with state.database.reading() as session:
        leases = LeaseService(session, state.settings.lease_seconds)
        version = StartService(session).file(leases.job_unlocked(principal.device_id, lease_id))
    file = files.find(state, version, files.RAW)
    return file_response(request, state.artifacts, file.sha256, file.path)


@router.put(
    "/{lease_id}/adapter",
    responses=raises(InvalidUpload, CohortMismatch, InvalidUpdate, RoundClosed, NotAMember, QuotaExceeded, *_UPLOADED),
    openapi_extra=BYTES,
)
async def upload_adapter(
    principal: Device, lease_id: str, request: Request, state: State, signature: ResultSignature
) -> UploadReceipt:
    """Uploads the trained LoRA-B: a safetensors file with one float32 tensor `lora_B` of D finite elements."""
    check_binary_type(request.headers)
    seconds, device_id = state.settings.lease_seconds, principal.device_id
    expected = await write_signed(state, principal, signature, expect_adapter, seconds, device_id, lease_id)
    async with staged_body(request, expected.limit) as staged:
        check_digest(signature, bytes.fromhex(staged.sha256))
        return await _upload(state, principal, lease_id, expected, staged)


@router.put("/{lease_id}/trajectory", responses=raises(InvalidTrajectory, *_UPLOADED), openapi_extra=BYTES)
async def upload_trajectory(
    principal: Device, lease_id: str, request: Request, state: State, signature: ResultSignature
) -> UploadReceipt:
    """Uploads the complete trajectory of the run, which a device sends only if its owner allows it."""
    check_binary_type(request.headers)
    trajectories = Trajectories(state.database, state.artifacts, state.settings)
    expected = await write_signed(state, principal, signature, trajectories.expect, principal.device_id, lease_id)
    async with staged_body(request, expected.limit) as staged:
        check_digest(signature, bytes.fromhex(staged.sha256))
        await state.get(READERS.make).run(principal.tenant, trajectories.check, expected, staged.path)
        return await _record(state, principal, lease_id, staged, "trajectory")


@router.post(
    "/{lease_id}/complete",
    responses=raises(
        *(Gone, Conflict, QuotaExceeded, ReplayedRequest, InvalidTrajectory, NotReplayable, TrajectoryMismatch),
        *(RoundClosed, NotAMember, InvalidUpdate),
    ),
)
async def complete_lease(
    principal: Device, lease_id: str, completion: Completion, state: State, signature: WholeResultSignature
) -> AdapterVersion | RoundReceipt:
    """Publishes the uploaded file as the adapter's next version and ends the job. A repeated request changes nothing.

    If the job belongs to a cohort's round, the file counts in the round instead. A trajectory that the completion names
    is replayed first, which takes seconds; if it does not yield the file, nothing changes.
    """
    device_id = principal.device_id
    proof = await _proof(state, principal, lease_id, completion)
    return await write_signed(
        state, principal, signature, uploads.complete, state.settings, device_id, lease_id, completion, proof
    )


async def _proof(state: AppState, principal: DevicePrincipal, lease_id: str, completion: Completion) -> Proof | None:
    """Returns the proof of the trajectory that a completion names, if any. The replay runs outside of transactions."""
    if completion.trajectory_sha256 is None:
        return None
    service = Trajectories(state.database, state.artifacts, state.settings)
    proof_request = await state.write_queue.transact(
        lambda session: service.begin(session, principal.device_id, lease_id, completion)
    )
    if proof_request is None:
        return None
    proof = await state.get(REPLAYERS.make).run(principal.tenant, service.prove, proof_request)
    if proof.rebuilt is not None:
        async with contextmanager_in_threadpool(state.artifacts.staging_file()) as staged:
            await run_in_threadpool(staged.write, proof.rebuilt)
            expected = ExpectedAdapter(proof_request.manifest.size, proof_request.update)
            await _upload(state, principal, lease_id, expected, staged)
    return proof
