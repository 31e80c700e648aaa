"""Routes of devices and enrolments."""

from __future__ import annotations

from typing import Annotated

from server.auth.guard import Enrolling, needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.devices.repository import DeviceRepository
from server.devices.service import DeviceService
from server.http.etags import IfMatch
from server.http.idempotency import Once
from server.http.pages import Paging
from server.http.place import Here, Reading, Writing
from server.http.routes import Routes
from server.info.service import server_info
from server.succession.service import KeyService
from shared.protocol import DeviceChange, DeviceEnrol, DeviceGrant, DeviceView, Enrolment, EnrolmentRequest, Page

router = Routes(prefix="/v1", tags=["devices"])


@router.post("/enrolments", status_code=201)
def invite(
    principal: Annotated[Principal, needs(Scope.DEVICES_WRITE)], request: EnrolmentRequest, session: Writing, once: Once
) -> Enrolment:
    """A one-time token with which one device may enrol in the operator's tenant."""
    return DeviceService(session).invite(principal.tenant, request.expires_in_seconds)


@router.post("/devices", status_code=201)
def enrol(bearer: Enrolling, request: DeviceEnrol, here: Here, session: Writing, once: Once) -> DeviceGrant:
    """Enrols a device; the one-time token is the request's bearer token."""
    device, token = DeviceService(session).enrol(bearer, request)
    return DeviceGrant(
        device_id=device.id, token=token, server=server_info(KeyService(session, here.settings).public())
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
