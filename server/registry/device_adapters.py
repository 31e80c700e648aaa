"""Adapters for devices: the published versions that a device may download, and the routes by which it does.

A device may download an adapter whose user is bound to it, and the adapter of a cohort for whose members it trains. All
other adapters are reported as absent.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request, Response
from sqlalchemy import CompoundSelect, Select, select, union
from sqlalchemy.orm import Session

from server.identity.access_rules import Device
from server.identity.devices import repository as devices
from server.identity.devices.repository import DeviceUser
from server.ports import Port
from server.programs.service import ProgramBlob, ProgramRepository
from server.registry import files
from server.registry.endpoints import ABSENT, FILE_OF_ADAPTER
from server.registry.models import Adapter, StoredVersion
from server.registry.repository import find_adapter, find_version
from server.web.downloads import file_response
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.errors import AdapterNotFound, NotFound, VersionHeld
from shared.protocol import DeviceAdapter
from shared.registry import VersionState

# Returns the query for the numbers of the adapters of the cohorts that a device is a member of, by the device's id.
SHARED: Port[Callable[[str], Select[int]]] = Port("device_adapters.shared")
router = Routes(prefix="/v1/devices/self/adapters/{name}/{revision}", tags=["devices"])
OWN_FILE = FILE_OF_ADAPTER | {"responses": FILE_OF_ADAPTER["responses"] | raises(VersionHeld)}


def _accessible_to(device_id: str) -> CompoundSelect[int]:
    """Selects the numbers of the adapters of a device's users, and of those that it shares through a cohort."""
    of_users = (
        select(Adapter.number)
        .join(DeviceUser, DeviceUser.user == Adapter.user)
        .join(devices.Device, (devices.Device.id == DeviceUser.device_id) & (devices.Device.tenant == Adapter.tenant))
        .where(DeviceUser.device_id == device_id)
    )
    return union(of_users, SHARED.get()(device_id))


def file_of_adapter(session: Session, device_id: str, sha256: str) -> ProgramBlob | None:
    """Returns a file of the program of any version that a device may download, or None."""
    statement = (
        select(ProgramBlob)
        .join(StoredVersion, StoredVersion.recipe_id == ProgramBlob.recipe_id)
        .where(ProgramBlob.sha256 == sha256, StoredVersion.adapter_number.in_(_accessible_to(device_id)))
    )
    return session.scalar(statement.limit(1))


def _version(session: Session, device: Device, name: str, revision: str) -> StoredVersion:
    """Returns a published version for a device. Raises AdapterNotFound, RevisionNotFound or VersionHeld."""
    adapter = find_adapter(session, device.tenant, name)
    accessible = select(Adapter.number).where(
        Adapter.number == adapter.number, Adapter.number.in_(_accessible_to(device.device_id))
    )
    if session.scalar(accessible) is None:
        raise AdapterNotFound(f"there is no adapter {name!r}")
    version = find_version(session, adapter, revision)
    if version.state is VersionState.HELD:
        raise VersionHeld(f"version {version.version} of {name!r} is waiting for approval")
    return version


@router.get("", responses=raises(*ABSENT, VersionHeld))
def get_device_adapter(principal: Device, name: str, revision: str, session: Reading) -> DeviceAdapter:
    """A published version of a user of this device or of its cohort, with its program."""
    version = _version(session, principal, name, revision)
    program = ProgramRepository(session).signed(version.recipe_id)
    if program is None:
        raise NotFound(f"the program of version {version.version} is not compiled")
    return DeviceAdapter(adapter=version.signed, program=program)


@router.head("/lora_B.safetensors", include_in_schema=False)
@router.get("/lora_B.safetensors", **OWN_FILE)
def download_device_adapter(principal: Device, name: str, revision: str, request: Request, state: State) -> Response:
    """The LoRA-B of that version; supports Range."""
    with state.database.reading() as session:
        version = _version(session, principal, name, revision)
    raw_file = files.find(state, version, files.RAW)
    return file_response(request, state.artifacts, raw_file.sha256, f"{name}-{version.version}.{raw_file.path}")
