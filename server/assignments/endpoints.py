"""Routes by which devices are assigned adapters, and by which they fetch them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response

from server.adapters import files
from server.adapters.endpoints import ABSENT, FILE_OF_ADAPTER
from server.adapters.resolution import find_adapter
from server.assignments.repository import AssignmentRepository
from server.assignments.service import AssignmentService, shown
from server.auth.guard import Device, needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.openapi import raises
from server.http.pages import Paging
from server.http.place import Here, Reading, Writing
from server.http.ranges import file_response
from server.http.routes import Routes
from shared.errors import AdapterNotFound, VersionHeld
from shared.protocol import AssignmentView, DeviceAdapter, Page

router = Routes(prefix="/v1", tags=["assignments"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Writer = Annotated[Principal, needs(Scope.ADAPTERS_WRITE)]
ONE = "/adapters/{name}/devices/{device_id}"
OWN = "/devices/self/adapters/{name}/{revision}"
OWN_FILE = FILE_OF_ADAPTER | {"responses": FILE_OF_ADAPTER["responses"] | raises(VersionHeld)}


@router.get("/adapters/{name}/devices", responses=raises(AdapterNotFound))
def assignments(principal: Reader, name: str, session: Reading, paging: Paging) -> Page[AssignmentView]:
    """The devices that an adapter was assigned to, newest first; those that trained it need no assignment."""
    adapter = find_adapter(session, principal.tenant, name)
    found = AssignmentRepository(session).page(adapter, paging)
    return paging.page([shown(adapter, row) for row in found.rows], found.before)


@router.put(ONE, responses=raises(AdapterNotFound))
def assign(principal: Writer, name: str, device_id: str, session: Writing) -> AssignmentView:
    """Lets a device have the adapter's published versions. Saying it twice is fine."""
    return AssignmentService(session).assign(principal.tenant, name, device_id)


@router.delete(ONE, status_code=204, responses=raises(AdapterNotFound))
def withdraw(principal: Writer, name: str, device_id: str, session: Writing) -> None:
    """Takes that back; what the device has fetched stays with it. Saying it twice is fine."""
    AssignmentService(session).withdraw(principal.tenant, name, device_id)


@router.get(OWN, responses=raises(*ABSENT, VersionHeld))
def own(principal: Device, name: str, revision: str, session: Reading) -> DeviceAdapter:
    """A published version that this device was assigned, or whose adapter it has trained; and its program."""
    service = AssignmentService(session)
    _, version = service.resolve(principal.tenant, principal.device_id or "", name, revision)
    return service.described(version)


@router.head(OWN + "/lora_B.safetensors", include_in_schema=False)
@router.get(OWN + "/lora_B.safetensors", **OWN_FILE)
def own_lora_b(principal: Device, name: str, revision: str, request: Request, here: Here) -> Response:
    """Its LoRA-B; takes Range."""
    with here.database.reading() as session:
        service = AssignmentService(session)
        _, version = service.resolve(principal.tenant, principal.device_id or "", name, revision)
        session.expunge_all()
    found = files.find(here.database, here.artifacts, version, files.RAW)
    return file_response(request, here.artifacts, found.sha256, f"{name}-{version.version}.{found.path}")
