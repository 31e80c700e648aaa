"""SQL for the adapters that a device may download."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import CompoundSelect, Select, delete, select, union
from sqlalchemy.orm import Session

from server.database.paging import PageRequest, PageRows, page_of
from server.identity.devices.repository import DeviceUser
from server.ports import Port
from server.programs.service import ProgramBlob
from server.registry.adapter_grants.models import AdapterGrant
from server.registry.models import Adapter, StoredVersion

# Returns the query for the numbers of the adapters of the cohorts that a device is a member of, by the device's id.
SHARED: Port[Callable[[str], Select[int]]] = Port("adapter_grants.shared")


def _seen_by(device_id: str) -> CompoundSelect[int]:
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
        chosen = AdapterGrant.adapter_number == adapter.number, AdapterGrant.device_id == device_id
        self._session.execute(delete(AdapterGrant).where(*chosen))

    def page(self, adapter: Adapter, request: PageRequest) -> PageRows[AdapterGrant]:
        """Returns a page of an adapter's grants, newest first."""
        statement = select(AdapterGrant).where(AdapterGrant.adapter_number == adapter.number)
        return page_of(self._session, statement, AdapterGrant, request)

    def sees(self, device_id: str, adapter: Adapter) -> bool:
        """Whether a device may download an adapter's published versions."""
        statement = select(Adapter.number).where(
            Adapter.number == adapter.number, Adapter.number.in_(_seen_by(device_id))
        )
        return self._session.scalar(statement) is not None

    def file(self, device_id: str, sha256: str) -> ProgramBlob | None:
        """Returns a program file of any version that a device may download, or None."""
        statement = (
            select(ProgramBlob)
            .join(StoredVersion, StoredVersion.recipe_id == ProgramBlob.recipe_id)
            .where(ProgramBlob.sha256 == sha256, StoredVersion.adapter_number.in_(_seen_by(device_id)))
        )
        return self._session.scalar(statement.limit(1))


def granted_file(session: Session, device_id: str, sha256: str) -> ProgramBlob | None:
    """A file of the program of a version that a device may have."""
    return AdapterGrantRepository(session).file(device_id, sha256)
