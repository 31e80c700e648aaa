"""The device authorization grant (RFC 8628): a device is enrolled by a code that an operator approves.

A person reads the user code to an operator, whose tenant the device joins. The device and its token are created when
the device polls for them, so that the token is shown once, to the holder of the device code.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Numbered, Table, utc_now
from server.identity.audit import AccessAction, AccessTrail, Subject
from server.identity.devices.repository import Device
from server.identity.devices.service import DeviceService, UserNames, check_key
from server.identity.oauth import (
    EXPIRED_KEPT_FOR,
    POLL_INTERVAL_SECONDS,
    REQUEST_SECONDS,
    CodeRequest,
    CodeRequests,
    OAuthError,
    RequestCodes,
    RequestState,
    format_user_code,
    new_user_code,
    read_user_code,
)
from server.identity.tokens import Principal, new_token, token_digest
from shared.errors import Conflict, NotFound
from shared.protocol import DeviceEnrollment, DeviceRequestView
from shared.signing import fingerprint

WAITING_PER_ADDRESS = 20  # requests at once
WAITING_IN_ALL = 10_000


class DeviceRequest(CodeRequest, Numbered, Table):
    """A device that asks to join (RFC 8628): it holds the device code, a person reads the user code to an operator."""

    __tablename__ = "device_requests"

    user_code: Mapped[str] = mapped_column(String(16), unique=True)  # without its dash
    public_key: Mapped[str] = mapped_column(String(100))
    platform: Mapped[str] = mapped_column(String(200))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    users: Mapped[UserNames] = mapped_column(
        Document(UserNames), default=lambda: UserNames(()), server_default="[]"
    )  # bound to the device when it is enrolled


def device_requests(session: Session) -> CodeRequests[DeviceRequest]:
    """Returns the requests to join."""
    return CodeRequests(session, DeviceRequest, DeviceRequest.user_code)


class AuthorizationService:
    """Requests to join, in one writing transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._requests = device_requests(session)

    def ask(self, client_id: str, device: DeviceEnrollment, address: str) -> RequestCodes:
        """Begins a request. Raises BadRequest for a key that is none, OAuthError if too many devices wait."""
        check_key(device.public_key)
        now = utc_now()
        self._requests.forget(now - EXPIRED_KEPT_FOR)
        if self._requests.waiting(now, address) >= WAITING_PER_ADDRESS:
            raise OAuthError(
                "slow_down", "too many devices at this address wait for an operator; try again in some minutes", 429
            )
        if self._requests.waiting(now) >= WAITING_IN_ALL:
            raise OAuthError(
                "slow_down", "too many devices wait; enroll with a one-time token, or try again in some minutes", 429
            )
        device_code, user_code = new_token("join"), new_user_code()
        self._requests.add(
            DeviceRequest(
                device_code_digest=token_digest(device_code),
                user_code=user_code,
                client_id=client_id,
                name=device.name,
                public_key=device.public_key,
                platform=device.platform,
                address=address,
                state=RequestState.PENDING,
                interval_seconds=POLL_INTERVAL_SECONDS,
                created_at=now,
                expires_at=now + timedelta(seconds=REQUEST_SECONDS),
            )
        )
        return RequestCodes(device_code, format_user_code(user_code), REQUEST_SECONDS, POLL_INTERVAL_SECONDS)

    def poll(self, client_id: str, device_code: str) -> tuple[Device, str] | OAuthError:
        """Returns the device and its token once, or an error, which is returned so that the transaction is committed.

        A question that comes before the interval is over makes the interval longer.
        """
        now = utc_now()
        request = self._requests.by_device_code(device_code, lock=True)
        if request is None or request.client_id != client_id or request.state is RequestState.USED:
            return OAuthError("invalid_grant", "the device code is not known here, or was used; enroll again")
        denied, expired = "an operator refused this device", "no operator approved this device in time; enroll again"
        tenant = request.polled(now, denied, expired)
        if isinstance(tenant, OAuthError):
            return tenant
        enroll = DeviceEnrollment(name=request.name, public_key=request.public_key, platform=request.platform)
        device, token = DeviceService(self._session).admit(tenant, enroll, request.users.root)
        request.state, request.device_id = RequestState.USED, device.id
        return device, token

    def find(self, tenant: str, user_code: str) -> DeviceRequestView:
        """A request by the code that its device shows. Raises NotFound, also for one that another tenant decided."""
        return _view(self._find(tenant, user_code, lock=False))

    def decide(
        self, principal: Principal, user_code: str, approved: bool, users: Iterable[str] = ()
    ) -> DeviceRequestView:
        """Admits the device to the operator's tenant, or refuses it. Repeating the same decision changes nothing.

        users: the users whose jobs the device will train.

        Raises NotFound, or Conflict if it was decided otherwise.
        """
        request, now = self._find(principal.tenant, user_code, lock=True), utc_now()
        if request.state is RequestState.PENDING:
            request.state = RequestState.APPROVED if approved else RequestState.DENIED
            request.tenant, request.decided_by, request.decided_at = principal.tenant, principal.token_id, now
            request.users = UserNames(tuple(sorted(set(users))))
            action = AccessAction.DEVICE_APPROVED if approved else AccessAction.DEVICE_DENIED
            AccessTrail(self._session).add(principal.tenant, principal, action, Subject(request.name))
        elif approved == (request.state is RequestState.DENIED):
            raise Conflict(f"the device was {'refused' if approved else 'let in'} before; it may ask again")
        return _view(request)

    def _find(self, tenant: str, user_code: str, lock: bool) -> DeviceRequest:
        code = read_user_code(user_code)
        request = self._requests.by_user_code(code, lock) if code is not None else None
        if request is not None and request.state is RequestState.PENDING and request.expires_at <= utc_now():
            request = None
        if request is None or request.tenant not in (None, tenant):
            raise _unknown()
        return request


def _unknown() -> NotFound:
    return NotFound("no device that waits shows this code; compare it with the device, whose codes do not last long")


def _view(request: DeviceRequest) -> DeviceRequestView:
    return DeviceRequestView(
        user_code=format_user_code(request.user_code),
        name=request.name,
        platform=request.platform,
        fingerprint=fingerprint(request.public_key),
        address=request.address,
        state=request.state.value,
        created_at=request.created_at,
        expires_at=request.expires_at,
        device_id=request.device_id,
        users=list(request.users.root),
    )
