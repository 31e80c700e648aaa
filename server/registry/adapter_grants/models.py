"""The table of adapter grants."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Moment, Numbered, Table


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
    granted_at: Mapped[datetime] = mapped_column(Moment)
