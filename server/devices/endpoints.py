"""Routes of devices and enrolments."""

from __future__ import annotations

from server.auth.guard import Bearer, Operator
from server.devices.repository import DeviceRepository
from server.devices.service import DeviceService
from server.http.idempotency import Once
from server.http.pages import Paging
from server.http.place import Here, Reading, Writing
from server.http.routes import Routes
from server.info.service import server_info
from shared.protocol import DeviceEnrol, DeviceGrant, DeviceView, Enrolment, EnrolmentRequest, Page

router = Routes(prefix="/v1", tags=["devices"])


@router.post("/enrolments", status_code=201)
def invite(request: EnrolmentRequest, session: Writing, principal: Operator, once: Once) -> Enrolment:
    """A one-time token with which one device may enrol in the operator's tenant."""
    return DeviceService(session).invite(principal.tenant, request.expires_in_seconds)


@router.post("/devices", status_code=201)
def enrol(request: DeviceEnrol, here: Here, session: Writing, bearer: Bearer, once: Once) -> DeviceGrant:
    """Enrols a device; the one-time token is the request's bearer token."""
    device, token = DeviceService(session).enrol(bearer, request)
    return DeviceGrant(device_id=device.id, token=token, server=server_info(here.public_key))


@router.get("/devices")
def devices(session: Reading, principal: Operator, paging: Paging) -> Page[DeviceView]:
    """The tenant's devices, newest first."""
    found = DeviceRepository(session).page(principal.tenant, paging)
    return paging.page([device.view() for device in found.rows], found.before)
