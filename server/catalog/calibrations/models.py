"""The table of calibrations."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Moment, Numbered, Table
from server.storage.store import FileColumn, FileReferences
from shared.catalog import CalibrationView


class StoredCalibration(Numbered, Table):
    """A calibration, by the sha256 of its file, which recipes name. It belongs to the server and not to a tenant."""

    __tablename__ = "calibrations"

    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    base_number: Mapped[int] = mapped_column(ForeignKey("bases.number"))
    kind: Mapped[str] = mapped_column(String(16))
    task: Mapped[str] = mapped_column(String(200))
    examples: Mapped[int] = mapped_column(BigInteger)
    modules: Mapped[int] = mapped_column()
    width: Mapped[int] = mapped_column()
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(Moment)

    def view(self, base: str) -> CalibrationView:
        """Returns the calibration as the API shows it. base: the name of its base model."""
        return CalibrationView(
            sha256=self.sha256,
            base=base,
            kind=self.kind,
            task=self.task,
            examples=self.examples,
            modules=self.modules,
            width=self.width,
            size=self.size,
            created_at=self.created_at,
        )


FILES = FileReferences(columns=(FileColumn(StoredCalibration.sha256),))
