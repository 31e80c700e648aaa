"""Routes that grant devices access to adapters, and the routes by which devices download them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response

from server.identity.access_rules import Device, needs
from server.identity.tokens import Principal
from server.registry import files
from server.registry.adapter_grants.service import AdapterGrantRepository, AdapterGrantService, grant_view
from server.registry.endpoints import ABSENT, FILE_OF_ADAPTER
from server.registry.repository import find_adapter
from server.web.downloads import file_response
from server.web.openapi import raises
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading, State, Writing
from shared.access import Scope
from shared.errors import AdapterNotFound, VersionHeld
from shared.protocol import AdapterGrantView, DeviceAdapter, Page

router = Routes(prefix="/v1", tags=["adapter-grants"])
Reader = Annotated[Principal, needs(Scope.ADAPTERS_READ)]
Writer = Annotated[Principal, needs(Scope.ADAPTERS_WRITE)]
ONE = "/adapters/{name}/devices/{device_id}"
OWN = "/devices/self/adapters/{name}/{revision}"
OWN_FILE = FILE_OF_ADAPTER | {"responses": FILE_OF_ADAPTER["responses"] | raises(VersionHeld)}


@router.get("/adapters/{name}/devices", responses=raises(AdapterNotFound))
def grants(principal: Reader, name: str, session: Reading, paging: Paging) -> Page[AdapterGrantView]:
    """Lists the devices with a grant for an adapter, newest first. Devices that trained it need no grant."""
    adapter = find_adapter(session, principal.tenant, name)
    page_rows = AdapterGrantRepository(session).page(adapter, paging)
    return paging.page([grant_view(adapter, row) for row in page_rows.rows], page_rows.before)


@router.put(ONE, responses=raises(AdapterNotFound))
def grant(principal: Writer, name: str, device_id: str, session: Writing) -> AdapterGrantView:
    """Lets a device download the adapter's published versions. Idempotent."""
    return AdapterGrantService(session).grant(principal.tenant, name, device_id)


@router.delete(ONE, status_code=204, responses=raises(AdapterNotFound))
def revoke(principal: Writer, name: str, device_id: str, session: Writing) -> None:
    """Revokes a grant; files that the device has downloaded stay on it. Idempotent."""
    AdapterGrantService(session).revoke(principal.tenant, name, device_id)


@router.get(OWN, responses=raises(*ABSENT, VersionHeld))
def own(principal: Device, name: str, revision: str, session: Reading) -> DeviceAdapter:
    """A published version that this device has a grant for or has trained, with its program."""
    service = AdapterGrantService(session)
    _, version = service.resolve(principal.tenant, principal.device_id, name, revision)
    return service.described(version)


@router.head(OWN + "/lora_B.safetensors", include_in_schema=False)
@router.get(OWN + "/lora_B.safetensors", **OWN_FILE)
def own_lora_b(principal: Device, name: str, revision: str, request: Request, state: State) -> Response:
    """The LoRA-B of that version; supports Range."""
    with state.database.reading() as session:
        service = AdapterGrantService(session)
        _, version = service.resolve(principal.tenant, principal.device_id, name, revision)
        session.expunge_all()
    raw_file = files.find(state, version, files.RAW)
    return file_response(request, state.artifacts, raw_file.sha256, f"{name}-{version.version}.{raw_file.path}")
