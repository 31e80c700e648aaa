"""The tables of trajectories, and of what was made of them."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Table


class StoredTrajectory(Table):
    """The trajectory that came with a version.

    head: what the LoRA-B file has before its numbers, so that it can be made again to the byte whatever library writes
    such files by then. Whether it is verified, and kept in B's place, the version says.
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
    """What B was after a step, as it was first made; the file itself is removed when nobody asks for it.

    head: what the file has before its numbers.
    """

    __tablename__ = "trajectory_steps"

    version_number: Mapped[int] = mapped_column(
        ForeignKey("trajectories.version_number", ondelete="CASCADE"), primary_key=True
    )
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sha256: Mapped[str] = mapped_column(String(64))
    head: Mapped[bytes] = mapped_column(LargeBinary)
