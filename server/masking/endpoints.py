"""Routes of masked rounds: what a device says and hears in each phase, under the lease of its job.

A device looks every few seconds (`GET`), and answers when the server waits for it. Every answer is how the round stands
after it; said twice, it counts once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated

from fastapi import Query, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from server.artifacts.naming import Collected
from server.artifacts.store import StorageFull
from server.auth.guard import Device
from server.auth.service import Principal
from server.devices.signatures import ResultSignature, SignedWriting, check_digest, spending
from server.http.bodies import check_binary_type, read_limited
from server.http.json_bodies import UnsupportedMediaType
from server.http.openapi import raises
from server.http.place import Here, Place
from server.http.problems import TooSlow
from server.http.routes import Routes
from server.leases.endpoints import BYTES
from server.masking.service import MaskingService
from shared.errors import BadSignature, Conflict, Gone, InvalidUpload, MaskingOut, Replayed, TooLarge, Untrusted
from shared.masking.messages import Advertisement, Consent, MaskingView, Phase, SealedShares, Unmasking
from shared.masking.session import MaskingSession
from shared.signing import parse_public

router = Routes(prefix="/v1/leases", tags=["leases"])
SAID = raises(Gone, Conflict, MaskingOut, Untrusted, InvalidUpload)


def _service(place: Place, session: Session) -> MaskingService:
    return MaskingService(session, place.artifacts, place.settings.lease_seconds)


def _answer(
    place: Place, session: Session, principal: Principal, lease_id: str, say: Callable[[MaskingSession, str], None]
) -> MaskingView:
    member = principal.device_id or ""
    return _service(place, session).answer(member, lease_id, lambda masking: say(masking, member))


def _look(place: Place, principal: Principal, lease_id: str, known: Phase | None) -> tuple[MaskingView, bool]:
    with place.database.reading() as session:
        return _service(place, session).view(principal.device_id or "", lease_id, known)


def _tick(place: Place, principal: Principal, lease_id: str) -> None:
    with place.database.writing() as session:
        _answer(place, session, principal, lease_id, lambda masking, member: None)


@router.get("/{lease_id}/masking", responses=raises(Gone, Conflict))
async def look(
    principal: Device,
    lease_id: str,
    here: Here,
    known: Annotated[Phase | None, Query(description="the phase whose materials the device has")] = None,
) -> MaskingView:
    """How the masked round stands for this device, and what the phase gives it to work with unless it knows that."""
    view, late = await run_in_threadpool(_look, here, principal, lease_id, known)
    if late:
        await here.turns.run(_tick, here, principal, lease_id)
        view, _ = await run_in_threadpool(_look, here, principal, lease_id, known)
    return view


@router.post("/{lease_id}/masking/keys", responses=SAID | raises(BadSignature))
def advertise(
    principal: Device, lease_id: str, advertisement: Advertisement, here: Here, session: SignedWriting
) -> MaskingView:
    """Phase `keys`: the device's public keys of this round, signed by the key that it enrolled with."""
    try:
        identity = parse_public(principal.public_key or "").public_bytes_raw()
    except Untrusted as error:
        raise BadSignature("this device enrolled without a key; enrol it again") from error
    return _answer(
        here, session, principal, lease_id, lambda masking, member: masking.advertise(member, identity, advertisement)
    )


@router.post("/{lease_id}/masking/shares", responses=SAID)
def share(principal: Device, lease_id: str, shares: SealedShares, here: Here, session: SignedWriting) -> MaskingView:
    """Phase `shares`: shares of the device's two secrets, sealed for each other device of the roster."""
    return _answer(here, session, principal, lease_id, lambda masking, member: masking.share(member, shares))


@router.put(
    "/{lease_id}/masking/vector",
    responses=SAID | raises(Collected, Replayed, StorageFull, TooLarge, TooSlow, UnsupportedMediaType),
    openapi_extra=BYTES,
)
async def mask(
    principal: Device, lease_id: str, request: Request, here: Here, signature: ResultSignature
) -> MaskingView:
    """Phase `vectors`: the masked update and weight, D + 1 little-endian words of the round's width."""
    check_binary_type(request.headers)
    device_id = principal.device_id or ""
    async with here.turns.holding(spending(here, principal, signature)) as session:
        limit = await run_in_threadpool(_service(here, session).size, device_id, lease_id)
    digest = hashlib.sha256()
    data = await read_limited(request, limit, digest.update)
    check_digest(signature, digest.digest())
    return await here.turns.run(_keep, here, principal, lease_id, digest.hexdigest(), data)


def _keep(place: Place, principal: Principal, lease_id: str, sha256: str, data: bytes) -> MaskingView:
    with place.database.writing() as session:
        return _answer(
            place, session, principal, lease_id, lambda masking, member: masking.masked(member, sha256, data)
        )


@router.post("/{lease_id}/masking/consent", responses=SAID)
def consent(principal: Device, lease_id: str, consent: Consent, here: Here, session: SignedWriting) -> MaskingView:
    """Phase `consents`: the device's signature over who is in the sum."""
    return _answer(here, session, principal, lease_id, lambda masking, member: masking.consent(member, consent))


@router.post("/{lease_id}/masking/unmask", responses=SAID)
def unmask(principal: Device, lease_id: str, unmasking: Unmasking, here: Here, session: SignedWriting) -> MaskingView:
    """Phase `unmasking`: shares that remove the masks of the sum, and of nothing else."""
    return _answer(here, session, principal, lease_id, lambda masking, member: masking.unmask(member, unmasking))
