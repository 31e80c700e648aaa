"""Routes of devices and enrollments."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from sqlalchemy.orm import Session

from server.identity.access_rules import Enrolling, needs
from server.identity.devices.repository import BindingRepository, Device, DeviceRepository
from server.identity.devices.service import BindingService, DeviceService
from server.identity.devices.service import revoke_device as revoke
from server.identity.signing_keys.service import KeyService, server_info
from server.identity.tokens import Principal
from server.web.idempotency import Once
from server.web.openapi import raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Scope
from shared.errors import Conflict, QuotaExceeded
from shared.job import NAME
from shared.protocol import DeviceChange, DeviceEnrollment, DeviceGrant, DeviceView, Enrollment, EnrollmentRequest, Page

router = Routes(prefix="/v1", tags=["devices"])
Reader = Annotated[Principal, needs(Scope.DEVICES_READ)]
Writer = Annotated[Principal, needs(Scope.DEVICES_WRITE)]
User = Annotated[str, Path(pattern=NAME)]


@router.post("/enrollments", status_code=201, responses=raises(QuotaExceeded))
def create_enrollment(principal: Writer, request: EnrollmentRequest, session: Writing, once: Once) -> Enrollment:
    """A one-time token with which one device may enroll in the operator's tenant."""
    return DeviceService(session).invite(principal.tenant, request.expires_in_seconds, request.users, principal)


@router.post("/devices", status_code=201, responses=raises(QuotaExceeded))
def enroll_device(
    bearer: Enrolling, request: DeviceEnrollment, state: State, session: Writing, once: Once
) -> DeviceGrant:
    """Enrolls a device; the one-time token is the request's bearer token."""
    device, token = DeviceService(session).enroll(bearer, request)
    return DeviceGrant(
        device_id=device.id, token=token, server=server_info(KeyService(session, state.settings).public())
    )


@router.get("/devices")
def list_devices(principal: Reader, session: Reading, paging: Paging) -> Page[DeviceView]:
    """The tenant's devices, newest first."""
    page_rows = DeviceRepository(session).page(principal.tenant, paging)
    users = BindingRepository(session).users_of([device.id for device in page_rows.rows])
    return paging.page([device.view(users[device.id]) for device in page_rows.rows], page_rows.before)


@router.get("/devices/{device_id}")
def get_device(principal: Reader, device_id: str, session: Reading) -> DeviceView:
    """Returns one device: its own report, and the labels and users that operators gave it."""
    return _view(session, DeviceService(session).get(principal.tenant, device_id))


@router.patch("/devices/{device_id}")
def update_device(principal: Writer, device_id: str, request: DeviceChange, session: Writing) -> DeviceView:
    """Sets a device's labels, by which jobs may ask for it."""
    service = DeviceService(session)
    device = service.get(principal.tenant, device_id, lock=True)
    service.label(device, request.labels)
    return _view(session, device)


@router.post("/devices/{device_id}/revoke")
def revoke_device(principal: Writer, device_id: str, session: Writing) -> DeviceView:
    """Revokes a device at once: its tokens end and its jobs return to the queue. Repeating it changes nothing."""
    return _view(session, revoke(session, principal.tenant, device_id, principal))


@router.put("/devices/{device_id}/users/{user}", responses=raises(Conflict))
def bind_user(principal: Writer, device_id: str, user: User, session: Writing) -> DeviceView:
    """Binds a user to a device: from now on the device gets the user's jobs. Idempotent."""
    device = DeviceService(session).get(principal.tenant, device_id, lock=True)
    BindingService(session).bind(device, [user])
    return _view(session, device)


@router.delete("/devices/{device_id}/users/{user}", status_code=204)
def unbind_user(principal: Writer, device_id: str, user: User, session: Writing) -> None:
    """Unbinds a user from a device. The user's jobs on the device return to the queue for other devices. Idempotent."""
    device = DeviceService(session).get(principal.tenant, device_id, lock=True)
    BindingService(session).unbind(device, user)


def _view(session: Session, device: Device) -> DeviceView:
    return device.view(sorted(BindingRepository(session).users(device.id)))
