"""The routes through which a device takes part in each phase of secure aggregation, under the lease of its job.

A device polls the state every few seconds (`GET`) and sends its message when the server waits for it. Every response
contains the state of the round after the message. Messages are idempotent.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from server.federation.secure_aggregation.service import SecureAggregationService
from server.identity.access_rules import (
    Device,
    ResultSignature,
    SignedWriting,
    check_digest,
    device_key,
    write_signed,
)
from server.identity.tokens import DevicePrincipal
from server.storage.store import Collected, StorageFull
from server.web.bodies import BYTES, UnsupportedMediaType, check_binary_type
from server.web.body_budgets import staged_body, stored
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, State
from shared.errors import (
    BadSignature,
    Conflict,
    Gone,
    InvalidUpload,
    LeftOutOfRound,
    ReplayedRequest,
    TooLarge,
    TooSlow,
    Untrusted,
)
from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Phase,
    SealedShares,
    SecureAggregationView,
    Unmasking,
)

router = Routes(prefix="/v1/leases", tags=["leases"])
ERRORS = raises(Gone, Conflict, LeftOutOfRound, Untrusted, InvalidUpload)


def _service(state: AppState, session: Session) -> SecureAggregationService:
    return SecureAggregationService(session, state.artifacts, state.settings.lease_seconds)


def _view(
    state: AppState, principal: DevicePrincipal, lease_id: str, known: Phase | None
) -> tuple[SecureAggregationView, bool]:
    with state.database.reading() as session:
        return _service(state, session).view(principal.device_id, lease_id, known)


@router.get("/{lease_id}/masking", responses=raises(Gone, Conflict))
async def get_masked_round(
    principal: Device,
    lease_id: str,
    state: State,
    known: Annotated[Phase | None, Query(description="phase whose inputs the device already has")] = None,
) -> SecureAggregationView:
    """Returns the state of the masked round for this device, with the phase's inputs unless the device has them."""
    view, late = await run_in_threadpool(_view, state, principal, lease_id, known)
    if late:
        await state.write_queue.transact(
            lambda session: _service(state, session).answer(
                principal.device_id, lease_id, lambda aggregation, member: None
            )
        )
        view, _ = await run_in_threadpool(_view, state, principal, lease_id, known)
    return view


@router.post("/{lease_id}/masking/keys", responses=ERRORS | raises(BadSignature))
def advertise_keys(
    principal: Device, lease_id: str, advertisement: Advertisement, state: State, session: SignedWriting
) -> SecureAggregationView:
    """Phase `keys`: accepts the device's public keys for this round, signed with its enrollment key."""
    identity = device_key(principal).public_bytes_raw()
    return _service(state, session).answer(
        principal.device_id,
        lease_id,
        lambda aggregation, member: aggregation.advertise(member, identity, advertisement),
    )


@router.post("/{lease_id}/masking/shares", responses=ERRORS)
def share_keys(
    principal: Device, lease_id: str, shares: SealedShares, state: State, session: SignedWriting
) -> SecureAggregationView:
    """Phase `shares`: accepts the shares of the device's two secrets, encrypted for each other device of the roster."""
    return _service(state, session).answer(
        principal.device_id, lease_id, lambda aggregation, member: aggregation.share(member, shares)
    )


@router.put(
    "/{lease_id}/masking/vector",
    responses=ERRORS | raises(Collected, ReplayedRequest, StorageFull, TooLarge, TooSlow, UnsupportedMediaType),
    openapi_extra=BYTES,
)
async def upload_masked_vector(
    principal: Device, lease_id: str, request: Request, state: State, signature: ResultSignature
) -> SecureAggregationView:
    """Phase `vectors`: accepts the masked update and weight, D + 1 little-endian words of the round's width."""
    check_binary_type(request.headers)

    def size(session: Session) -> int:
        return _service(state, session).size(principal.device_id, lease_id)

    limit = await write_signed(state, principal, signature, size)
    async with staged_body(request, limit) as staged:
        check_digest(signature, bytes.fromhex(staged.sha256))
        data = staged.view()
        # Stored first, so that no transaction waits for the store.
        async with stored(state, principal.tenant, staged):
            return await state.write_queue.transact(
                lambda session: _service(state, session).answer(
                    principal.device_id,
                    lease_id,
                    lambda aggregation, member: aggregation.submit_vector(member, staged.sha256, data),
                )
            )


@router.post("/{lease_id}/masking/consent", responses=ERRORS)
def consent_to_unmasking(
    principal: Device, lease_id: str, consent: Consent, state: State, session: SignedWriting
) -> SecureAggregationView:
    """Phase `consents`: accepts the device's signature over the list of devices in the sum."""
    return _service(state, session).answer(
        principal.device_id, lease_id, lambda aggregation, member: aggregation.consent(member, consent)
    )


@router.post("/{lease_id}/masking/unmask", responses=ERRORS)
def unmask_round(
    principal: Device, lease_id: str, unmasking: Unmasking, state: State, session: SignedWriting
) -> SecureAggregationView:
    """Phase `unmasking`: accepts the shares that remove the masks from the sum, and from nothing else."""
    return _service(state, session).answer(
        principal.device_id, lease_id, lambda aggregation, member: aggregation.unmask(member, unmasking)
    )
