"""Bearer tokens: their table and SQL, issuing, checking and revoking them, and when they were last used."""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import anyio.to_thread
import structlog
from sqlalchemy import Dialect, ForeignKey, Index, Row, String, Text, bindparam, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from server.database.columns import Numbered, Table, UtcTime, new_id, text_enum, utc_now
from server.database.database import Database, Repository, read_columns
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.devices.repository import Device
from server.identity.tenants import Tenant, TenantService, User, UserService
from shared.access import Role, Scope, allowed_scopes, default_scopes
from shared.canonical import sha256_hex
from shared.errors import BadRequest, Conflict, MobizoError, NotFound, TenantSuspended, Unauthorized, Unavailable

REVOKED = "this device was revoked; ask the operator for a one-time token and enroll it again"
TOKEN_DAYS = 90  # for which a person's or service's token is valid by default
WRITE_SECONDS = 60.0  # between two writes of last-used times
_log = structlog.get_logger()
_OURS = re.compile(r"mobizo-(operator|app|device)-[A-Za-z0-9_-]{43}")
_SCOPES_BY_NAME = {str(scope): scope for scope in Scope}


def new_token(kind: str) -> str:
    """Returns a bearer token of 256 random bits. Its prefix identifies it for people and secret scanners."""
    return f"mobizo-{kind}-{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    """Returns the stored digest of a token. One hash round suffices, because 256 random bits cannot be guessed."""
    return sha256_hex(token.encode())


class ScopeWords(TypeDecorator[frozenset[Scope]]):
    """A set of scopes as text. A word that this version does not know allows nothing."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: frozenset[Scope] | None, dialect: Dialect) -> str | None:
        """Returns the scopes as words, sorted."""
        return None if value is None else " ".join(sorted(value))

    def process_result_value(self, value: Any | None, dialect: Dialect) -> frozenset[Scope] | None:
        """Returns the scopes."""
        return (
            None
            if value is None
            else frozenset(_SCOPES_BY_NAME[name] for name in value.split() if name in _SCOPES_BY_NAME)
        )


class Token(Numbered, Table):
    """A bearer token, stored as its digest."""

    __tablename__ = "tokens"
    __table_args__ = (Index("ix_tokens_tenant", "tenant", "number", "role"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[Role] = mapped_column(text_enum(Role))
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    name: Mapped[str] = mapped_column(String(96))
    scopes: Mapped[frozenset[Scope]] = mapped_column(ScopeWords, default=frozenset[Scope])
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcTime)


ALIVE = (
    select(Token.number)
    .join(Tenant, Tenant.name == Token.tenant)
    .join(User, User.id == Token.user_id, isouter=True)
    .where(
        Token.id == bindparam("token"),
        Token.revoked_at.is_(None),
        or_(Token.expires_at.is_(None), Token.expires_at > bindparam("now", type_=UtcTime)),
        User.disabled_at.is_(None),
        Tenant.suspended_at.is_(None),
    )
)
# What a request's check needs of its token, in one read by an index; columns alone, since it happens at every request.
HOLDERS = (
    select(
        Token.digest,
        Token.number,
        Token.id,
        Token.name,
        Token.role,
        Token.tenant,
        Token.scopes,
        Token.device_id,
        Token.user_id,
        Token.expires_at,
        Token.revoked_at,
        User.name.label("user"),
        User.disabled_at,
        Tenant.suspended_at,
        Device.public_key,
    )
    .join(Tenant, Tenant.name == Token.tenant)
    .join(User, User.id == Token.user_id, isouter=True)
    .join(Device, Device.id == Token.device_id, isouter=True)
    .where(Token.digest.in_(bindparam("digests", expanding=True)))
)


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


@dataclass(frozen=True)
class DevicePrincipal(Principal):
    """A device that sends a request."""

    device_id: str


class TokenService(Repository):
    """Tokens in one transaction."""

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
        TenantService(self._session).get(tenant)
        token_scopes = default_scopes(role, tenant) if scopes is None else frozenset(scopes)
        if excess := token_scopes - allowed_scopes(role):
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
            scopes=token_scopes,
            device_id=device_id,
            user_id=None if user is None else user.id,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        self.add(token)
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
        owner = None if user is None else UserService(self._session).get(tenant, user)
        role = role or (owner.role if owner else None)
        if role is None:
            raise BadRequest("give a role (operator or app), or a user")
        if role is Role.DEVICE:
            raise BadRequest("devices get their tokens by enrolling; `mobizo-server device enroll-token` lets one in")
        if owner is not None and not allowed_scopes(role) <= allowed_scopes(owner.role):
            raise BadRequest(f"user {user!r} is an {owner.role} and can have no token of role {role}")
        return self.issue(role, tenant, name, scopes=scopes, lifetime=lifetime, user=owner)

    def principal(self, text: str) -> Principal:
        """Returns the holder of a token. Raises Unauthorized if it is unknown, expired or revoked, TenantSuspended."""
        result = self.principals([text])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def principals(self, texts: Sequence[str]) -> list[Principal | Exception]:
        """Returns the holder of each token, or the error that `principal` raises for it."""
        # A text that does not have the form of our tokens is not looked up in the database.
        digests = [token_digest(text) if _OURS.fullmatch(text) else None for text in texts]
        holders = self._holders({digest for digest in digests if digest is not None})
        results: list[Principal | Exception] = []
        for digest in digests:
            try:
                results.append(self._checked(None if digest is None else holders.get(digest)))
            except MobizoError as error:
                results.append(error)
        return results

    def principal_of(self, digest: str) -> Principal:
        """Returns the holder of the token of that digest. Raises as `principal`."""
        return self._checked(self._holders([digest]).get(digest))

    def _holders(self, digests: Collection[str]) -> dict[str, Row[*tuple[Any, ...]]]:
        """Returns the tokens of these digests, live or not, with the states of their users and tenants."""
        return {row.digest: row for row in read_columns(self._session, HOLDERS, {"digests": list(digests)})}

    def _checked(self, holder: Row[*tuple[Any, ...]] | None) -> Principal:
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
        kind = DevicePrincipal if holder.role is Role.DEVICE else Principal
        return kind(
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

    def alive(self, token_id: str) -> bool:
        """Returns whether a token is still valid."""
        return self._session.scalar(ALIVE, {"token": token_id, "now": utc_now()}) is not None

    def page(self, tenant: str, request: PageRequest) -> PageRows[Token]:
        """Returns a page of the tokens of a tenant's users and services, newest first."""
        return page_of(self._session, Token, request, Token.tenant == tenant, Token.role != Role.DEVICE)

    def of_tenant(self, tenant: str, token_id: str) -> Token:
        """Returns a token of a tenant's users and services, live or not. Raises NotFound."""
        token = self._one(Token, Token.id == token_id, Token.tenant == tenant, Token.role != Role.DEVICE)
        if token is None:
            raise NotFound(f"there is no token {token_id}")
        return token

    def count_live(self, tenant: str, now: datetime) -> int:
        """Returns how many valid tokens a tenant's users and services have."""
        live = Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > now)
        return self._count(Token.tenant == tenant, Token.role != Role.DEVICE, *live)

    def used(self, moments: Mapping[int, datetime]) -> None:
        """Stores when tokens (by number) were last used, unless a later time is stored."""
        statement = (
            update(Token)
            .where(
                Token.number == bindparam("token"),
                or_(Token.last_used_at.is_(None), Token.last_used_at < bindparam("moment")),
            )
            .values(last_used_at=bindparam("moment"))
        )
        connection = self._session.connection()
        connection.execute(statement, [{"token": number, "moment": moment} for number, moment in moments.items()])

    def revoke_device(self, device_id: str) -> None:
        """Revokes every token of a device at once."""
        live = update(Token).where(Token.device_id == device_id, Token.revoked_at.is_(None))
        self._session.execute(live.values(revoked_at=utc_now()))

    def revoke(self, token_id: str) -> None:
        """Revokes a token at once. Raises NotFound."""
        live = update(Token).where(Token.id == token_id, Token.revoked_at.is_(None))
        if self._session.scalar(live.values(revoked_at=utc_now()).returning(Token.id)) is None:
            raise NotFound(f"no live token has id {token_id!r}; `mobizo token list` shows them")


class LastUsed:
    """Last-used times that are not written yet, by token number, so that requests do not wait for the writes.

    They are written once a minute; a crash loses at most the last minute.
    """

    def __init__(self) -> None:
        self._moments: dict[int, datetime] = {}
        self._lock = threading.Lock()

    def note(self, token: int, moment: datetime) -> None:
        """Records that a token was used."""
        with self._lock:
            self._moments[token] = moment

    def write(self, database: Database) -> None:
        """Writes the recorded times; keeps them for the next attempt if the database is unavailable."""
        with self._lock:
            moments, self._moments = self._moments, {}
        if not moments:
            return
        try:
            with database.writing() as session:
                TokenService(session).used(moments)
        except (SQLAlchemyError, Unavailable) as error:
            with self._lock:
                self._moments = moments | self._moments
            _log.warning("token-uses-not-written", error=str(error).split("\n")[0])

    async def keep_writing(self, database: Database) -> None:
        """Writes once a minute until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await anyio.to_thread.run_sync(self.write, database)


def make_last_used(state: object) -> LastUsed:
    """Makes the last-used times of a process's tokens, for `AppState.get`."""
    return LastUsed()
