"""Assigning adapters to devices, and what a device may have. Knows no HTTP and no files.

A device may have the published versions of an adapter of its own tenant that it was assigned, or that it has trained a
version of. For all others it is as if they were not there.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.adapters.resolution import find_adapter, find_version
from server.assignments.models import Assignment
from server.assignments.repository import AssignmentRepository
from server.clock import utc_now
from server.devices.repository import DeviceRepository
from server.programs.repository import ProgramRepository
from shared.errors import AdapterNotFound, NotFound, VersionHeld
from shared.protocol import AssignmentView, DeviceAdapter
from shared.registry import VersionState


class AssignmentService:
    """Assignments in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._assignments = AssignmentRepository(session)

    def assign(self, tenant: str, name: str, device_id: str) -> AssignmentView:
        """Lets a device have an adapter; twice is once. Raises AdapterNotFound, or NotFound for the device."""
        adapter = find_adapter(self._session, tenant, name, lock=True)
        device = DeviceRepository(self._session).get(tenant, device_id)
        if device is None or device.revoked_at is not None:
            raise NotFound(f"no device {device_id!r} is enrolled here")
        found = self._assignments.get(adapter, device_id)
        if found is None:
            found = Assignment(adapter_number=adapter.number, device_id=device_id, assigned_at=utc_now())
            self._assignments.add(found)
        return shown(adapter, found)

    def withdraw(self, tenant: str, name: str, device_id: str) -> None:
        """Takes an assignment back; what the device has fetched stays with it. Raises AdapterNotFound."""
        self._assignments.remove(find_adapter(self._session, tenant, name, lock=True), device_id)

    def resolve(self, tenant: str, device_id: str, name: str, revision: str) -> tuple[Adapter, StoredVersion]:
        """A published version for a device, and its adapter.

        Raises AdapterNotFound for one that it may not have as for one that is not there; RevisionNotFound, VersionHeld.
        """
        adapter = find_adapter(self._session, tenant, name)
        if not self._assignments.sees(device_id, adapter):
            raise AdapterNotFound(f"there is no adapter {name!r}")
        version = find_version(self._session, adapter, revision)
        if version.state is VersionState.HELD:
            raise VersionHeld(f"version {version.version} of {name!r} waits for approval; no device may have it yet")
        return adapter, version

    def described(self, version: StoredVersion) -> DeviceAdapter:
        """What a device must know of a version to use it. Raises NotFound while its program is not compiled."""
        program = ProgramRepository(self._session).signed(version.recipe_id)
        if program is None:
            raise NotFound(f"the program of version {version.version} is not compiled")
        return DeviceAdapter(adapter=version.signed, program=program)


def shown(adapter: Adapter, assignment: Assignment) -> AssignmentView:
    """As the API shows it."""
    return AssignmentView(adapter=adapter.name, device_id=assignment.device_id, assigned_at=assignment.assigned_at)
