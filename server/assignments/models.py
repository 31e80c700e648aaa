"""The table of adapters that devices were assigned."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table


class Assignment(Numbered, Table):
    """That a device may have an adapter's published versions, whoever trained them."""

    __tablename__ = "adapter_assignments"
    __table_args__ = (
        UniqueConstraint("adapter_number", "device_id"),
        Index("ix_adapter_assignments_device", "device_id", "adapter_number"),
        Index("ix_adapter_assignments_adapter", "adapter_number", "number"),
    )

    adapter_number: Mapped[int] = mapped_column(ForeignKey("adapters.number", ondelete="CASCADE"))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    assigned_at: Mapped[datetime] = mapped_column(Moment)
