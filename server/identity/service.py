"""Tenants and their users, and tokens: issuing, checking and revoking them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.identifiers import new_id, new_token, token_digest
from server.identity.models import Role, Scope, Tenant, Token, User
from server.identity.repository import TenantRepository, TokenRepository, UserRepository
from shared.access import DEFAULT_TENANT, allowed_scopes, default_scopes
from shared.errors import BadRequest, Conflict, NotFound, TenantSuspended, Unauthorized
from shared.job import NAME

__all__ = ["DEFAULT_TENANT", "Principal", "TenantService", "TokenService", "UserService"]

REVOKED = "this device was revoked; ask the operator for a one-time token and enroll it again"
_OURS = re.compile(r"mobizo-(operator|app|device)-[A-Za-z0-9_-]{43}")


def _check_name(kind: str, name: str) -> None:
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"{kind} {name!r} must match {NAME}")


class TenantService:
    """Tenants in one transaction."""

    def __init__(self, session: Session) -> None:
        self._tenants = TenantRepository(session)

    def create(self, name: str) -> Tenant:
        """Creates a tenant. Raises BadRequest for an invalid name, Conflict for one that exists."""
        _check_name("tenant", name)
        if self._tenants.by_name(name) is not None:
            raise Conflict(f"there is a tenant {name!r} already")
        tenant = Tenant(name=name, created_at=utc_now())
        self._tenants.add(tenant)
        return tenant

    def get(self, name: str) -> Tenant:
        """Returns the tenant of that name. Raises NotFound."""
        tenant = self._tenants.by_name(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r}; `mobizo-server tenants create` makes one")
        return tenant

    def suspend(self, name: str) -> None:
        """Rejects all of the tenant's tokens from now on, those of its devices too. Nothing is deleted."""
        tenant = self.get(name)
        if tenant.suspended_at is None:
            tenant.suspended_at = utc_now()

    def resume(self, name: str) -> None:
        """Accepts the tenant's tokens again."""
        self.get(name).suspended_at = None


class UserService:
    """A tenant's users in one transaction."""

    def __init__(self, session: Session) -> None:
        self._tenants = TenantService(session)
        self._users = UserRepository(session)

    def create(self, tenant: str, name: str, role: Role) -> User:
        """Creates a user, whose tokens may do at most what the role may.

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
        """Returns a tenant's user. Raises NotFound."""
        user = self._users.by_name(tenant, name)
        if user is None:
            raise NotFound(f"tenant {tenant!r} has no user {name!r}; `mobizo-server users list` shows them")
        return user

    def disable(self, tenant: str, name: str) -> User:
        """Revokes a user's tokens at once and allows no new ones. Raises NotFound."""
        user = self.get(tenant, name)
        if user.disabled_at is None:
            user.disabled_at = utc_now()
        return user


@dataclass(frozen=True)
class Principal:
    """The caller of a request, and what its token allows."""

    tenant: str
    role: Role
    token_id: str
    device_id: str | None
    scopes: frozenset[Scope] = frozenset()
    token_number: int = 0
    name: str = ""
    user: str | None = None
    expires_at: datetime | None = None
    public_key: str | None = None  # a device's


class TokenService:
    """Tokens in one transaction."""

    def __init__(self, session: Session) -> None:
        self._tokens = TokenRepository(session)
        self._tenants = TenantService(session)
        self._users = UserService(session)

    def issue(
        self,
        role: Role,
        tenant: str,
        name: str,
        device_id: str | None = None,
        *,
        scopes: Iterable[Scope] | None = None,
        lifetime: timedelta | None = None,
        user: User | None = None,
    ) -> tuple[Token, str]:
        """Creates a token; returns its record and the text, which is shown once.

        scopes: what it may do; None: the default of its role and tenant. lifetime: None: it never expires.
        Raises NotFound for an unknown tenant, BadRequest for scopes that the role cannot have, Conflict for a
        disabled user.
        """
        role = Role(role)
        self._tenants.get(tenant)
        given = default_scopes(role, tenant) if scopes is None else frozenset(scopes)
        if excess := given - allowed_scopes(role):
            raise BadRequest(f"a token of role {role} cannot have: {', '.join(sorted(excess))}")
        if user is not None and user.disabled_at is not None:
            raise Conflict(f"user {user.name!r} is disabled and can have no tokens")
        now = utc_now()
        text = new_token(role)
        token = Token(
            id=new_id("token"),
            digest=token_digest(text),
            role=role,
            tenant=tenant,
            name=name,
            scopes=given,
            device_id=device_id,
            user_id=None if user is None else user.id,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        self._tokens.add(token)
        return token, text

    def make(
        self,
        tenant: str,
        role: Role | None,
        name: str,
        *,
        scopes: Iterable[Scope] | None,
        lifetime: timedelta | None,
        user: str | None,
    ) -> tuple[Token, str]:
        """Creates a token for a service, or for a user (by name), whose role it has unless a lesser one is given.

        Raises BadRequest for no role, a device's, or one beyond the user's; else as `issue`, and NotFound for an
        unknown user.
        """
        owner = None if user is None else self._users.get(tenant, user)
        role = role or (owner.role if owner else None)
        if role is None:
            raise BadRequest("give a role (operator or app), or a user")
        if role is Role.DEVICE:
            raise BadRequest("devices get their tokens by enrolling; `mobizo-server enroll-token` lets one in")
        if owner is not None and not allowed_scopes(role) <= allowed_scopes(owner.role):
            raise BadRequest(f"user {user!r} is an {owner.role} and can have no token of role {role}")
        return self.issue(role, tenant, name, scopes=scopes, lifetime=lifetime, user=owner)

    def principal(self, text: str) -> Principal:
        """Returns the holder of a token. Raises Unauthorized if it is unknown, expired or revoked, TenantSuspended."""
        # A text that does not have the form of our tokens is not looked up in the database.
        holder = self._tokens.holder(token_digest(text)) if _OURS.fullmatch(text) else None
        if holder is not None and holder.revoked_at is not None and holder.role is Role.DEVICE:
            raise Unauthorized(REVOKED)
        if holder is None or holder.revoked_at is not None:
            raise Unauthorized("the token is not known here or was revoked; ask the operator for a new one")
        if holder.disabled_at is not None:
            raise Unauthorized("the token's user was disabled; ask the operator")
        if holder.expires_at is not None and holder.expires_at <= utc_now():
            raise Unauthorized("the token has expired; ask the operator for a new one")
        if holder.suspended_at is not None:
            raise TenantSuspended
        return Principal(
            tenant=holder.tenant,
            role=holder.role,
            token_id=holder.id,
            device_id=holder.device_id,
            scopes=holder.scopes,
            token_number=holder.number,
            name=holder.name,
            user=holder.user,
            expires_at=holder.expires_at,
            public_key=holder.public_key,
        )

    def revoke_device(self, device_id: str) -> None:
        """Revokes every token of a device at once."""
        self._tokens.revoke_device(device_id, utc_now())

    def revoke(self, token_id: str) -> None:
        """Revokes a token at once. Raises NotFound."""
        if not self._tokens.revoke(token_id, utc_now()):
            raise NotFound(f"no live token has id {token_id!r}; `mobizo-server tokens list` shows them")
