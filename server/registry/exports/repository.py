"""All SQL about conversions and their files."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from server.database.database import locked
from server.registry.exports.models import Conversion, ConversionFile
from server.registry.models import Adapter, StoredVersion
from shared.protocol import MergedForm


class ConversionRepository:
    """Conversions in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def of_version(self, version: StoredVersion, form: MergedForm) -> Conversion | None:
        """Returns the conversion of a version into one form."""
        return self._session.scalar(_of_version(version, form))

    def of_version_locked(self, version: StoredVersion, form: MergedForm) -> Conversion:
        """Returns the conversion of a version, which is known to exist, locked until the transaction ends."""
        return self._session.scalars(locked(_of_version(version, form))).one()

    def files(self, conversion: Conversion) -> Sequence[ConversionFile]:
        """Returns the files of a conversion by name; none until it is ready."""
        statement = select(ConversionFile).where(ConversionFile.conversion_number == conversion.number)
        return self._session.scalars(statement.order_by(ConversionFile.path)).all()

    def add_files(self, files: Sequence[ConversionFile]) -> None:
        """Stores the files of a conversion."""
        self._session.add_all(files)

    def version(self, conversion: Conversion) -> tuple[Adapter, StoredVersion]:
        """Returns the adapter and version that a conversion converts."""
        version = self._session.get_one(StoredVersion, conversion.version_number)
        return self._session.get_one(Adapter, version.adapter_number), version

    def get_one(self, conversion_id: str) -> Conversion:
        """Returns a conversion that is known to exist."""
        return self._session.scalars(select(Conversion).where(Conversion.id == conversion_id)).one()

    def get_locked(self, conversion_id: str) -> Conversion | None:
        """Returns a conversion, locked until the transaction ends."""
        return self._session.scalar(locked(select(Conversion).where(Conversion.id == conversion_id)))


def _of_version(version: StoredVersion, form: MergedForm) -> Select[Conversion]:
    return select(Conversion).where(Conversion.version_number == version.number, Conversion.form == form)
