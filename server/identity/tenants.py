"""Tenants and their users: tables, SQL, and rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String, Text, UniqueConstraint, select
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Numbered, Table, UtcTime, new_id, text_enum, utc_now
from server.database.database import Repository
from shared.access import Role
from shared.errors import BadRequest, Conflict, NotFound
from shared.job import NAME


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"{kind} {name!r} must match {NAME}")


class Tenant(Numbered, Table):
    """An isolated customer account."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(96), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    suspended_at: Mapped[datetime | None] = mapped_column(UtcTime)
    quotas: Mapped[str] = mapped_column(Text, default="{}", server_default="{}")  # `quotas.QuotaChanges` as JSON
    stored_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class User(Numbered, Table):
    """A person of a tenant, who may have several tokens."""

    __tablename__ = "users"
    __table_args__ = (UniqueConstraint("tenant", "name"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(String(96))
    role: Mapped[Role] = mapped_column(text_enum(Role))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcTime)


class TenantService(Repository):
    """Tenants in one transaction."""

    def find(self, name: str) -> Tenant | None:
        """Returns the tenant of that name."""
        return self._one(Tenant, Tenant.name == name)

    def all(self) -> Sequence[Tenant]:
        """Returns every tenant, oldest first."""
        return self._all(Tenant)

    def create(self, name: str) -> Tenant:
        """Creates a tenant. Raises BadRequest for an invalid name, Conflict for one that exists."""
        _check_name("tenant", name)
        if self.find(name) is not None:
            raise Conflict(f"there is a tenant {name!r} already")
        tenant = Tenant(name=name, created_at=utc_now())
        self.add(tenant)
        return tenant

    def get(self, name: str) -> Tenant:
        """Returns the tenant of that name. Raises NotFound."""
        tenant = self.find(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r}; create it with `mobizo-server tenant create`")
        return tenant

    def suspend(self, name: str) -> None:
        """Rejects all of the tenant's tokens from now on, those of its devices too. Nothing is deleted."""
        tenant = self.get(name)
        if tenant.suspended_at is None:
            tenant.suspended_at = utc_now()

    def resume(self, name: str) -> None:
        """Accepts the tenant's tokens again."""
        self.get(name).suspended_at = None


class UserService(Repository):
    """A tenant's users in one transaction."""

    def all(self, tenant: str) -> Sequence[User]:
        """Returns every user of a tenant, oldest first."""
        return self._all(User, User.tenant == tenant)

    def names(self, ids: set[str]) -> dict[str, str]:
        """Returns the names of users by their ids."""
        rows = self._session.execute(select(User.id, User.name).where(User.id.in_(ids)))
        return {row.id: row.name for row in rows}

    def create(self, tenant: str, name: str, role: Role) -> User:
        """Creates a user, whose tokens may do at most what the role may.

        Raises BadRequest for a bad name or a device's role, NotFound for an unknown tenant, Conflict for a name taken.
        """
        _check_name("user", name)
        if role is Role.DEVICE:
            raise BadRequest("a user is an operator or an app; devices enroll instead")
        TenantService(self._session).get(tenant)
        if self._find(tenant, name) is not None:
            raise Conflict(f"tenant {tenant!r} has a user {name!r} already")
        user = User(id=new_id("user"), tenant=tenant, name=name, role=role, created_at=utc_now())
        self.add(user)
        return user

    def get(self, tenant: str, name: str) -> User:
        """Returns a tenant's user. Raises NotFound."""
        user = self._find(tenant, name)
        if user is None:
            raise NotFound(f"tenant {tenant!r} has no user {name!r}; `mobizo-server user list` shows them")
        return user

    def disable(self, tenant: str, name: str) -> User:
        """Revokes a user's tokens at once and allows no new ones. Raises NotFound."""
        user = self.get(tenant, name)
        if user.disabled_at is None:
            user.disabled_at = utc_now()
        return user

    def _find(self, tenant: str, name: str) -> User | None:
        return self._one(User, User.tenant == tenant, User.name == name)
