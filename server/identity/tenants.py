"""Tenants and their people."""

from __future__ import annotations

import re

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.identifiers import new_id
from server.identity.models import Role, Tenant, User
from server.identity.repository import TenantRepository, UserRepository
from shared.errors import BadRequest, Conflict, NotFound
from shared.job import NAME


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"{kind} {name!r} must match {NAME}")


class TenantService:
    """Tenants in one transaction."""

    def __init__(self, session: Session) -> None:
        self._tenants = TenantRepository(session)

    def create(self, name: str) -> Tenant:
        """A new tenant. Raises BadRequest for a bad name, Conflict for one that there is."""
        _check_name("tenant", name)
        if self._tenants.by_name(name) is not None:
            raise Conflict(f"there is a tenant {name!r} already")
        tenant = Tenant(name=name, created_at=utc_now())
        self._tenants.add(tenant)
        return tenant

    def get(self, name: str) -> Tenant:
        """The tenant of that name. Raises NotFound."""
        tenant = self._tenants.by_name(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r}; `mobizo-server tenants create` makes one")
        return tenant

    def suspend(self, name: str) -> None:
        """From now on none of the tenant's tokens opens anything, its devices' neither. Nothing is deleted."""
        tenant = self.get(name)
        if tenant.suspended_at is None:
            tenant.suspended_at = utc_now()

    def resume(self, name: str) -> None:
        """The tenant's tokens open again what they did."""
        self.get(name).suspended_at = None


class UserService:
    """A tenant's people in one transaction."""

    def __init__(self, session: Session) -> None:
        self._tenants = TenantService(session)
        self._users = UserRepository(session)

    def create(self, tenant: str, name: str, role: Role) -> User:
        """A new user, whose tokens may do at most what the role may.

        Raises BadRequest for a bad name or a device's role, NotFound for an unknown tenant, Conflict for a name taken.
        """
        _check_name("user", name)
        if role is Role.DEVICE:
            raise BadRequest("a user is an operator or an app; devices enroll instead")
        self._tenants.get(tenant)
        if self._users.by_name(tenant, name) is not None:
            raise Conflict(f"tenant {tenant!r} has a user {name!r} already")
        user = User(id=new_id("user"), tenant=tenant, name=name, role=role, created_at=utc_now())
        self._users.add(user)
        return user

    def get(self, tenant: str, name: str) -> User:
        """A tenant's user. Raises NotFound."""
        user = self._users.by_name(tenant, name)
        if user is None:
            raise NotFound(f"tenant {tenant!r} has no user {name!r}; `mobizo-server users list` shows them")
        return user

    def disable(self, tenant: str, name: str) -> User:
        """Ends a user's tokens at once, and lets the user have no more. Raises NotFound."""
        user = self.get(tenant, name)
        if user.disabled_at is None:
            user.disabled_at = utc_now()
        return user
