"""Routes of devices and enrollments."""

from __future__ import annotations

from typing import Annotated

from server.identity.access_rules import Enrolling, needs
from server.identity.devices.repository import DeviceRepository
from server.identity.devices.service import DeviceService
from server.identity.models import Scope
from server.identity.service import Principal
from server.identity.signing_keys.service import KeyService, server_info
from server.web.etags import IfMatch
from server.web.idempotency import Once
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.protocol import DeviceChange, DeviceEnrollment, DeviceGrant, DeviceView, Enrollment, EnrollmentRequest, Page

router = Routes(prefix="/v1", tags=["devices"])


@router.post("/enrollments", status_code=201)
def invite(
    principal: Annotated[Principal, needs(Scope.DEVICES_WRITE)],
    request: EnrollmentRequest,
    session: Writing,
    once: Once,
) -> Enrollment:
    """A one-time token with which one device may enroll in the operator's tenant."""
    return DeviceService(session).invite(principal.tenant, request.expires_in_seconds)


@router.post("/devices", status_code=201)
def enroll(bearer: Enrolling, request: DeviceEnrollment, state: State, session: Writing, once: Once) -> DeviceGrant:
    """Enrolls a device; the one-time token is the request's bearer token."""
    device, token = DeviceService(session).enroll(bearer, request)
    return DeviceGrant(
        device_id=device.id, token=token, server=server_info(KeyService(session, state.settings).public())
    )


@router.get("/devices")
def devices(
    principal: Annotated[Principal, needs(Scope.DEVICES_READ)], session: Reading, paging: Paging
) -> Page[DeviceView]:
    """The tenant's devices, newest first."""
    found = DeviceRepository(session).page(principal.tenant, paging)
    return paging.page([device.view() for device in found.rows], found.before)


@router.get("/devices/{device_id}")
def device(principal: Annotated[Principal, needs(Scope.DEVICES_READ)], device_id: str, session: Reading) -> DeviceView:
    """One device: what it said of itself, and what operators said of it."""
    return DeviceService(session).get(principal.tenant, device_id).view()


@router.patch("/devices/{device_id}")
def change(
    principal: Annotated[Principal, needs(Scope.DEVICES_WRITE)],
    device_id: str,
    request: DeviceChange,
    session: Writing,
    expected: IfMatch,
) -> DeviceView:
    """Sets a device's labels, by which jobs may ask for it."""
    service = DeviceService(session)
    found = service.get(principal.tenant, device_id, lock=True)
    expected.check(found.view())
    service.label(found, request.labels)
    return found.view()
