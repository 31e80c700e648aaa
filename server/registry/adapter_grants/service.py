"""Grants of adapters to devices, and the versions that a device may download.

A device may download the published versions of an adapter of its tenant if it has a grant, or if it has trained a
version and the adapter's user is still bound to it.
All other adapters are reported as absent.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import DeviceRepository
from server.programs.service import ProgramRepository
from server.registry.adapter_grants.models import AdapterGrant
from server.registry.adapter_grants.repository import AdapterGrantRepository
from server.registry.models import Adapter, StoredVersion
from server.registry.repository import find_adapter, find_version
from shared.errors import AdapterNotFound, NotFound, VersionHeld
from shared.protocol import AdapterGrantView, DeviceAdapter
from shared.registry import VersionState


class AdapterGrantService:
    """Adapter grants in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._grants = AdapterGrantRepository(session)

    def grant(self, tenant: str, name: str, device_id: str) -> AdapterGrantView:
        """Grants an adapter to a device; idempotent. Raises AdapterNotFound, or NotFound for the device."""
        adapter = find_adapter(self._session, tenant, name, lock=True)
        device = DeviceRepository(self._session).get(tenant, device_id)
        if device is None or device.revoked_at is not None:
            raise NotFound(f"no device {device_id!r} is enrolled here")
        found = self._grants.get(adapter, device_id)
        if found is None:
            found = AdapterGrant(adapter_number=adapter.number, device_id=device_id, granted_at=utc_now())
            self._grants.add(found)
        return shown(adapter, found)

    def revoke(self, tenant: str, name: str, device_id: str) -> None:
        """Revokes a grant; downloaded files stay on the device. Raises AdapterNotFound."""
        self._grants.remove(find_adapter(self._session, tenant, name, lock=True), device_id)

    def resolve(self, tenant: str, device_id: str, name: str, revision: str) -> tuple[Adapter, StoredVersion]:
        """A published version for a device, and its adapter.

        Raises AdapterNotFound (also without a grant), RevisionNotFound or VersionHeld.
        """
        adapter = find_adapter(self._session, tenant, name)
        if not self._grants.sees(device_id, adapter):
            raise AdapterNotFound(f"there is no adapter {name!r}")
        version = find_version(self._session, adapter, revision)
        if version.state is VersionState.HELD:
            raise VersionHeld(f"version {version.version} of {name!r} is waiting for approval")
        return adapter, version

    def described(self, version: StoredVersion) -> DeviceAdapter:
        """Returns the manifests a device needs to use a version. Raises NotFound while its program is not compiled."""
        program = ProgramRepository(self._session).signed(version.recipe_id)
        if program is None:
            raise NotFound(f"the program of version {version.version} is not compiled")
        return DeviceAdapter(adapter=version.signed, program=program)


def shown(adapter: Adapter, grant: AdapterGrant) -> AdapterGrantView:
    """Returns the API's view of a grant."""
    return AdapterGrantView(adapter=adapter.name, device_id=grant.device_id, granted_at=grant.granted_at)
