"""The tables of adapters: versions, approval rules, generated files, and the audit trail with all its SQL.

An entry of the audit trail is added in the transaction of the action that it records.

Tables of other packages must reference versions with ON DELETE CASCADE, because deleted versions are purged.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, text_enum, utc_now, view_of
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.audit import PUBLISH
from server.identity.tokens import Principal
from server.storage.store import FileColumn
from shared.protocol import AdapterVersion
from shared.recipe import Recipe
from shared.registry import AdapterAction, AdapterEvent, AdapterManifest, ApprovalRule, SignedAdapter, VersionState
from shared.result import Result
from shared.zo.lora import BaseShape

_DELETED = text("deleted_at IS NOT NULL")
_IS_HELD = text("kept_state = 'held' AND deleted_at IS NULL")
_OF_COHORT = frozenset(
    {
        *(AdapterAction.JOINED, AdapterAction.LEFT),
        *(AdapterAction.ROUND_OPENED, AdapterAction.ROUND_CLOSED, AdapterAction.ROUND_ABANDONED),
    }
)


class Adapter(Numbered, Table):
    """A named adapter of a tenant. Its versions are numbered from 1 and never change."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant", "name"),
        Index("ix_adapters_tenant", "tenant", "number", "deleted_at"),
        Index("ix_adapters_deleted", "deleted_at", sqlite_where=_DELETED, postgresql_where=_DELETED),
    )

    tenant: Mapped[str] = mapped_column(String(96))
    name: Mapped[str] = mapped_column(String(96))
    user: Mapped[str] = mapped_column(String(96))
    versions: Mapped[int] = mapped_column(default=0)
    main_version: Mapped[int | None] = mapped_column()
    rule: Mapped[ApprovalRule | None] = mapped_column(Document(ApprovalRule))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcTime)


class StoredVersion(Numbered, Table):
    """One immutable version and its state."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_number", "version"),
        # For lists of versions, and for the latest approved version.
        Index("ix_adapter_versions_state", "adapter_number", "number", "kept_state", "deleted_at"),
        Index("ix_adapter_versions_held", "adapter_number", "number", sqlite_where=_IS_HELD, postgresql_where=_IS_HELD),
        Index("ix_adapter_versions_revision", "adapter_number", "revision"),
        Index("ix_adapter_versions_device", "device_id", "adapter_number"),
        Index("ix_adapter_versions_deleted", "deleted_at", sqlite_where=_DELETED, postgresql_where=_DELETED),
    )

    adapter_number: Mapped[int] = mapped_column(ForeignKey("adapters.number"))
    version: Mapped[int] = mapped_column()
    # The job and device that trained it; NULL for a version of a cohort's round, which has many.
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), unique=True)
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    shape: Mapped[BaseShape] = mapped_column(Document(BaseShape))
    recipe_id: Mapped[str] = mapped_column(String(64))
    a_sha256: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64), index=True)
    size: Mapped[int] = mapped_column(BigInteger)
    stored_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # with its trajectory
    size_d: Mapped[int] = mapped_column(BigInteger)
    result: Mapped[Result] = mapped_column(Document(Result))
    verified: Mapped[bool] = mapped_column(default=False, server_default=false())  # its trajectory yields B
    from_trajectory: Mapped[bool] = mapped_column(default=False, server_default=false())  # B is rebuilt on request
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    manifest: Mapped[AdapterManifest] = mapped_column(Document(AdapterManifest), nullable=True)
    revision: Mapped[str] = mapped_column(String(40), nullable=True)
    key_id: Mapped[str] = mapped_column(String(16), index=True, nullable=True)
    signature: Mapped[str] = mapped_column(String(100), nullable=True)
    # HELD, APPROVED or DEPRECATED; a deleted version keeps its state, because it may be restored.
    kept_state: Mapped[VersionState] = mapped_column(
        text_enum(VersionState), default=VersionState.APPROVED, server_default=str(VersionState.APPROVED)
    )
    message: Mapped[str] = mapped_column(Text, default="", server_default="")
    deleted_at: Mapped[datetime | None] = mapped_column(UtcTime)

    @property
    def state(self) -> VersionState:
        """The state of the version."""
        return VersionState.DELETED if self.deleted_at is not None else self.kept_state

    @property
    def signed(self) -> SignedAdapter:
        """The manifest with the server's signature."""
        return SignedAdapter(manifest=self.manifest, key_id=self.key_id, signature=self.signature)

    def view(self, adapter: Adapter, removed_after: datetime | None = None) -> AdapterVersion:
        """Returns the row as the API shows it."""
        parent, cohort = self.manifest.parent, self.manifest.cohort
        others = {"adapter": adapter.name, "parent": parent, "cohort": cohort, "removed_after": removed_after}
        return view_of(AdapterVersion, self, **others)


class StoredEvent(Numbered, Table):
    """An entry of the audit trail. Entries are never changed, and remain after the adapter is removed."""

    __tablename__ = "adapter_events"
    __table_args__ = (
        Index("ix_adapter_events_adapter", "tenant", "adapter", "number"),
        Index("ix_adapter_events_tenant", "tenant", "number"),
    )

    tenant: Mapped[str] = mapped_column(String(96))
    adapter: Mapped[str] = mapped_column(String(96))
    at: Mapped[datetime] = mapped_column(UtcTime)
    actor: Mapped[str] = mapped_column(String(64))
    actor_name: Mapped[str] = mapped_column(String(96))
    user: Mapped[str | None] = mapped_column(String(96))
    action: Mapped[AdapterAction] = mapped_column(text_enum(AdapterAction))
    version: Mapped[int | None] = mapped_column()
    main_before: Mapped[int | None] = mapped_column()
    main_after: Mapped[int | None] = mapped_column()
    tag: Mapped[str | None] = mapped_column(String(96))  # of earlier releases
    reason: Mapped[str] = mapped_column(Text)


class TenantRule(Table):
    """The rule that approves new versions of a tenant's adapters that have no rule of their own."""

    __tablename__ = "approval_rules"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    rule: Mapped[ApprovalRule] = mapped_column(Document(ApprovalRule))


class StoredPeftFile(Table):
    """A file generated from a version when it was first requested."""

    __tablename__ = "peft_files"

    version_number: Mapped[int] = mapped_column(ForeignKey("adapter_versions.number"), primary_key=True)
    path: Mapped[str] = mapped_column(String(100), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64), index=True)


# Garbage collection may remove the LoRA-B of a version that is stored as its trajectory; it is rebuilt on request.
FILES = (
    FileColumn(StoredVersion.sha256, StoredVersion.from_trajectory.is_(False)),
    FileColumn(StoredPeftFile.sha256),
)


@dataclass(frozen=True)
class Actor:
    """The author of an action: a token, a device, or the server itself."""

    id: str
    name: str = ""
    user: str | None = None

    @classmethod
    def of(cls, principal: Principal) -> Actor:
        """Returns the actor of a request."""
        return cls(principal.token_id, principal.name, principal.user)


SERVER = Actor("server")


@dataclass(frozen=True)
class AuditEntry:
    """An entry without its author and time. main: the version numbers before and after, if the action moved `main`."""

    action: AdapterAction
    version: int | None = None
    main: tuple[int | None, int | None] = (None, None)
    reason: str = ""


class AuditTrail:
    """The audit trail in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, adapter: Adapter, actor: Actor, entry: AuditEntry) -> None:
        """Adds an entry, and publishes it to webhooks."""
        before, after = entry.main
        row = StoredEvent(
            tenant=adapter.tenant,
            adapter=adapter.name,
            at=utc_now(),
            actor=actor.id,
            actor_name=actor.name,
            user=actor.user,
            action=entry.action,
            version=entry.version,
            main_before=before,
            main_after=after,
            reason=entry.reason,
        )
        self._session.add(row)
        subject = "cohort" if entry.action in _OF_COHORT else "version"
        name = f"{subject}.{entry.action.replace('-', '_')}"
        data = {"adapter": adapter.name, "version": entry.version, "main": after, "reason": entry.reason}
        PUBLISH.get()(self._session, adapter.tenant, name, data)

    def page(self, tenant: str, name: str, request: PageRequest) -> PageRows[StoredEvent]:
        """Returns a page of the entries about an adapter, newest first. The adapter may have been removed."""
        return page_of(self._session, StoredEvent, request, StoredEvent.tenant == tenant, StoredEvent.adapter == name)

    def of_tenant(self, tenant: str, request: PageRequest) -> PageRows[StoredEvent]:
        """Returns a page of the entries about all adapters of a tenant, newest first."""
        return page_of(self._session, StoredEvent, request, StoredEvent.tenant == tenant)


def event_view(row: StoredEvent) -> AdapterEvent:
    """Returns an entry as the API shows it."""
    return view_of(AdapterEvent, row, name=row.actor_name)
