"""All SQL about tenants, users and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, bindparam, or_, select, update
from sqlalchemy.orm import Session

from server.database.columns import Moment
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.devices.models import Device
from server.identity.models import Role, Tenant, Token, User


class TenantRepository:
    """Tenants in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, tenant: Tenant) -> None:
        """Stores a new tenant."""
        self._session.add(tenant)
        self._session.flush()

    def by_name(self, name: str) -> Tenant | None:
        """Returns the tenant of that name."""
        return self._session.scalar(select(Tenant).where(Tenant.name == name))

    def all(self) -> Sequence[Tenant]:
        """Returns every tenant, oldest first."""
        return self._session.scalars(select(Tenant).order_by(Tenant.number)).all()


class UserRepository:
    """Users in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, user: User) -> None:
        """Stores a new user."""
        self._session.add(user)
        self._session.flush()

    def by_name(self, tenant: str, name: str) -> User | None:
        """Returns a tenant's user of that name."""
        return self._session.scalar(select(User).where(User.tenant == tenant, User.name == name))

    def all(self, tenant: str) -> Sequence[User]:
        """Returns every user of a tenant, oldest first."""
        return self._session.scalars(select(User).where(User.tenant == tenant).order_by(User.number)).all()

    def names(self, ids: set[str]) -> dict[str, str]:
        """Returns the names of users by their ids."""
        rows = self._session.execute(select(User.id, User.name).where(User.id.in_(ids)))
        return {row.id: row.name for row in rows}


ALIVE = (
    select(Token.number)
    .join(Tenant, Tenant.name == Token.tenant)
    .join(User, User.id == Token.user_id, isouter=True)
    .where(
        Token.id == bindparam("token"),
        Token.revoked_at.is_(None),
        or_(Token.expires_at.is_(None), Token.expires_at > bindparam("now", type_=Moment)),
        User.disabled_at.is_(None),
        Tenant.suspended_at.is_(None),
    )
)
# What a request's check needs of its token, in one read by an index; columns alone, since it happens at every request.
HOLDER = (
    select(
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
    .where(Token.digest == bindparam("digest"))
)


class TokenRepository:
    """Tokens in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, token: Token) -> None:
        """Stores a new token."""
        self._session.add(token)
        self._session.flush()

    def holder(self, digest: str) -> Row[*tuple[Any, ...]] | None:
        """Returns the token of that digest, live or not, with the state of its user and tenant."""
        return self._session.execute(HOLDER, {"digest": digest}).one_or_none()

    def alive(self, token_id: str, now: datetime) -> bool:
        """Returns whether a token is still valid."""
        return self._session.scalar(ALIVE, {"token": token_id, "now": now}) is not None

    def all_alive(self, token_ids: set[str], now: datetime) -> set[str]:
        """Returns which of these tokens are still valid."""
        return {token_id for token_id in token_ids if self.alive(token_id, now)}

    def all(self) -> Sequence[Token]:
        """Returns every token, oldest first."""
        return self._session.scalars(select(Token).order_by(Token.number)).all()

    def page(self, tenant: str, request: PageRequest) -> PageRows[Token]:
        """Returns a page of the tokens of a tenant's users and services, newest first."""
        statement = select(Token).where(Token.tenant == tenant, Token.role != Role.DEVICE)
        return page_of(self._session, statement, Token, request)

    def of_tenant(self, tenant: str, token_id: str) -> Token | None:
        """Returns a token of a tenant's users and services, live or not."""
        return self._session.scalar(
            select(Token).where(Token.id == token_id, Token.tenant == tenant, Token.role != Role.DEVICE)
        )

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

    def revoke_device(self, device_id: str, now: datetime) -> None:
        """Revokes every token of a device."""
        live = update(Token).where(Token.device_id == device_id, Token.revoked_at.is_(None))
        self._session.execute(live.values(revoked_at=now))

    def revoke(self, token_id: str, now: datetime) -> bool:
        """Revokes a token. Returns False if no live token has that id."""
        live = update(Token).where(Token.id == token_id, Token.revoked_at.is_(None))
        return self._session.scalar(live.values(revoked_at=now).returning(Token.id)) is not None
