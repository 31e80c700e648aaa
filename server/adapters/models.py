"""The tables of adapters, their versions, and the PEFT files made of them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table
from shared.job import Result
from shared.lora import BaseShape
from shared.protocol import AdapterVersion
from shared.recipe import Recipe


class Adapter(Numbered, Table):
    """A name in a tenant's registry; its versions count from 1 and never change."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant", "name"), Index("ix_adapters_tenant", "tenant", "number"))

    tenant: Mapped[str] = mapped_column(String(96))
    name: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    versions: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(Moment)


class StoredVersion(Numbered, Table):
    """One immutable version."""

    __tablename__ = "adapter_versions"
    __table_args__ = (UniqueConstraint("adapter_number", "version"),)

    adapter_number: Mapped[int] = mapped_column(ForeignKey("adapters.number"))
    version: Mapped[int] = mapped_column()
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    shape: Mapped[BaseShape] = mapped_column(Document(BaseShape))
    recipe_id: Mapped[str] = mapped_column(String(64))
    a_sha256: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64), index=True)
    size: Mapped[int] = mapped_column(BigInteger)
    size_d: Mapped[int] = mapped_column(BigInteger)
    result: Mapped[Result] = mapped_column(Document(Result))
    verified: Mapped[bool] = mapped_column(default=False, server_default=false())  # its trajectory yields B
    by_ledger: Mapped[bool] = mapped_column(default=False, server_default=false())  # B is made of it when asked for
    created_at: Mapped[datetime] = mapped_column(Moment)

    def view(self, adapter: Adapter) -> AdapterVersion:
        """As the API shows it."""
        return AdapterVersion(
            adapter=adapter.name,
            version=self.version,
            job_id=self.job_id,
            device_id=self.device_id,
            recipe=self.recipe,
            recipe_id=self.recipe_id,
            a_sha256=self.a_sha256,
            sha256=self.sha256,
            size=self.size,
            size_d=self.size_d,
            result=self.result,
            verified=self.verified,
            created_at=self.created_at,
        )


class StoredPeftFile(Table):
    """A file of a version's PEFT directory, made when it was first asked for."""

    __tablename__ = "peft_files"

    version_number: Mapped[int] = mapped_column(ForeignKey("adapter_versions.number"), primary_key=True)
    path: Mapped[str] = mapped_column(String(100), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64), index=True)
