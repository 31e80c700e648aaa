"""The tables of trajectories and of the steps that were rebuilt from them."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Table
from server.storage.references import FileColumn, FileReferences


class StoredTrajectory(Table):
    """The trajectory that came with a version.

    head: the bytes of the LoRA-B file before its numbers, so that the file can be rebuilt exactly even if a later
    library writes other headers. The version records whether the trajectory is verified and replaces B.
    """

    __tablename__ = "trajectories"

    version_number: Mapped[int] = mapped_column(
        ForeignKey("adapter_versions.number", ondelete="CASCADE"), primary_key=True
    )
    sha256: Mapped[str] = mapped_column(String(64), index=True)
    size: Mapped[int] = mapped_column(BigInteger)
    steps: Mapped[int] = mapped_column()
    start_sha256: Mapped[str | None] = mapped_column(String(64))
    head: Mapped[bytes] = mapped_column(LargeBinary)


class MaterialisedStep(Table):
    """A file of B after a step. Garbage collection removes the file if it is not requested for a while.

    head: the bytes of the file before its numbers.
    """

    __tablename__ = "trajectory_steps"

    version_number: Mapped[int] = mapped_column(
        ForeignKey("trajectories.version_number", ondelete="CASCADE"), primary_key=True
    )
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str] = mapped_column(String(64))
    head: Mapped[bytes] = mapped_column(LargeBinary)


FILES = FileReferences(columns=(FileColumn(StoredTrajectory.sha256),))
