"""The tables of tenants, users and tokens."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Dialect, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from server.database.columns import Moment, Numbered, Table, word
from shared.access import Role, Scope

_KNOWN = {str(scope): scope for scope in Scope}
__all__ = ["Role", "Scope", "Tenant", "Token", "User"]


class ScopeWords(TypeDecorator[frozenset[Scope]]):
    """A set of scopes as text. A word that this version does not know allows nothing."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: frozenset[Scope] | None, dialect: Dialect) -> str | None:
        """Returns the scopes as words, sorted."""
        return None if value is None else " ".join(sorted(value))

    def process_result_value(self, value: Any | None, dialect: Dialect) -> frozenset[Scope] | None:
        """Returns the scopes."""
        return None if value is None else frozenset(_KNOWN[name] for name in value.split() if name in _KNOWN)


class Tenant(Numbered, Table):
    """An isolated customer account."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(96), unique=True)
    created_at: Mapped[datetime] = mapped_column(Moment)
    suspended_at: Mapped[datetime | None] = mapped_column(Moment)


class User(Numbered, Table):
    """A person of a tenant, who may have several tokens."""

    __tablename__ = "users"
    __table_args__ = (UniqueConstraint("tenant", "name"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(String(96))
    role: Mapped[Role] = mapped_column(word(Role))
    created_at: Mapped[datetime] = mapped_column(Moment)
    disabled_at: Mapped[datetime | None] = mapped_column(Moment)


class Token(Numbered, Table):
    """A bearer token, stored as its digest."""

    __tablename__ = "tokens"
    __table_args__ = (Index("ix_tokens_tenant", "tenant", "number", "role"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[Role] = mapped_column(word(Role))
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(String(96))
    scopes: Mapped[frozenset[Scope]] = mapped_column(ScopeWords, default=frozenset[Scope])
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime | None] = mapped_column(Moment)
    last_used_at: Mapped[datetime | None] = mapped_column(Moment)
    revoked_at: Mapped[datetime | None] = mapped_column(Moment)
