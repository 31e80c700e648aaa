"""Grants of adapters to devices, and the versions that a device may download.

A device may download the published versions of an adapter of its tenant if it has a grant, or if it has trained a
version and the adapter's user is still bound to it.
All other adapters are reported as absent.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from sqlalchemy import CompoundSelect, ForeignKey, Index, Select, UniqueConstraint, delete, select, union
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Numbered, Table, UtcTime, utc_now
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.devices.repository import DeviceRepository, DeviceUser
from server.ports import Port
from server.programs.service import ProgramBlob, ProgramRepository
from server.registry.models import Adapter, StoredVersion
from server.registry.repository import find_adapter, find_version
from shared.errors import AdapterNotFound, NotFound, VersionHeld
from shared.protocol import AdapterGrantView, DeviceAdapter
from shared.registry import VersionState


class AdapterGrant(Numbered, Table):
    """Lets a device download an adapter's published versions."""

    __tablename__ = "adapter_grants"
    __table_args__ = (
        UniqueConstraint("adapter_number", "device_id"),
        Index("ix_adapter_grants_device", "device_id", "adapter_number"),
        Index("ix_adapter_grants_adapter", "adapter_number", "number"),
    )

    adapter_number: Mapped[int] = mapped_column(ForeignKey("adapters.number", ondelete="CASCADE"))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    granted_at: Mapped[datetime] = mapped_column(UtcTime)


# Returns the query for the numbers of the adapters of the cohorts that a device is a member of, by the device's id.
SHARED: Port[Callable[[str], Select[int]]] = Port("adapter_grants.shared")


def _accessible_to(device_id: str) -> CompoundSelect[int]:
    """Selects the numbers of adapters that a device has a grant for, has trained, or shares through a cohort.

    An adapter that it trained is left out once the adapter's user is no longer bound to it.
    """
    assigned = select(AdapterGrant.adapter_number).where(AdapterGrant.device_id == device_id)
    trained = (
        select(StoredVersion.adapter_number)
        .join(Adapter, Adapter.number == StoredVersion.adapter_number)
        .join(DeviceUser, (DeviceUser.user == Adapter.user) & (DeviceUser.device_id == StoredVersion.device_id))
        .where(StoredVersion.device_id == device_id)
    )
    return union(assigned, trained, SHARED.get()(device_id))


class AdapterGrantRepository:
    """Adapter grants in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, grant: AdapterGrant) -> None:
        """Stores a new grant."""
        self._session.add(grant)
        self._session.flush()

    def get(self, adapter: Adapter, device_id: str) -> AdapterGrant | None:
        """Returns the grant of an adapter to a device, or None."""
        return self._session.scalar(
            select(AdapterGrant).where(
                AdapterGrant.adapter_number == adapter.number, AdapterGrant.device_id == device_id
            )
        )

    def remove(self, adapter: Adapter, device_id: str) -> None:
        """Deletes a grant if it exists."""
        conditions = AdapterGrant.adapter_number == adapter.number, AdapterGrant.device_id == device_id
        self._session.execute(delete(AdapterGrant).where(*conditions))

    def page(self, adapter: Adapter, request: PageRequest) -> PageRows[AdapterGrant]:
        """Returns a page of an adapter's grants, newest first."""
        statement = select(AdapterGrant).where(AdapterGrant.adapter_number == adapter.number)
        return page_of(self._session, statement, AdapterGrant, request)

    def sees(self, device_id: str, adapter: Adapter) -> bool:
        """Whether a device may download an adapter's published versions."""
        statement = select(Adapter.number).where(
            Adapter.number == adapter.number, Adapter.number.in_(_accessible_to(device_id))
        )
        return self._session.scalar(statement) is not None

    def file(self, device_id: str, sha256: str) -> ProgramBlob | None:
        """Returns a program file of any version that a device may download, or None."""
        statement = (
            select(ProgramBlob)
            .join(StoredVersion, StoredVersion.recipe_id == ProgramBlob.recipe_id)
            .where(ProgramBlob.sha256 == sha256, StoredVersion.adapter_number.in_(_accessible_to(device_id)))
        )
        return self._session.scalar(statement.limit(1))


def granted_file(session: Session, device_id: str, sha256: str) -> ProgramBlob | None:
    """A file of the program of a version that a device may have."""
    return AdapterGrantRepository(session).file(device_id, sha256)


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
        grant = self._grants.get(adapter, device_id)
        if grant is None:
            grant = AdapterGrant(adapter_number=adapter.number, device_id=device_id, granted_at=utc_now())
            self._grants.add(grant)
        return grant_view(adapter, grant)

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


def grant_view(adapter: Adapter, grant: AdapterGrant) -> AdapterGrantView:
    """Returns the API's view of a grant."""
    return AdapterGrantView(adapter=adapter.name, device_id=grant.device_id, granted_at=grant.granted_at)
