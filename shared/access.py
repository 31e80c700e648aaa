"""Roles, scopes and the JSON models of API tokens."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from shared.job import NAME
from shared.strict_model import StrictModel

MAX_DAYS = 3650  # longest lifetime of a token that expires
DEFAULT_TENANT = "default"  # tenant of the server's operator; it always exists


class Role(StrEnum):
    """The role of a token's holder."""

    OPERATOR = "operator"  # manages the devices of its tenant; includes the permissions of an app
    APP = "app"
    DEVICE = "device"  # trains; has no scopes, since its routes accept devices only


class Scope(StrEnum):
    """A permission of a token, always limited to its tenant."""

    JOBS_READ = "jobs:read"  # jobs and their compiled programs
    JOBS_WRITE = "jobs:write"  # submit and cancel
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"  # approve, promote and delete
    ADAPTERS_SCORE = "adapters:score"  # score and generate with adapters on the server
    COHORTS_READ = "cohorts:read"
    COHORTS_WRITE = "cohorts:write"  # create cohorts, add and remove members, open and close rounds
    PRIVACY_WRITE = "privacy:write"  # set users' privacy budgets
    DEVICES_READ = "devices:read"
    DEVICES_WRITE = "devices:write"  # enroll, change and revoke devices
    TOKENS_WRITE = "tokens:write"  # list, create and revoke tokens
    WEBHOOKS_WRITE = "webhooks:write"  # create, list, test and delete webhooks; their events need the scopes of reading
    SERVER_READ = "server:read"  # the server's resource usage
    METRICS_READ = "metrics:read"  # metrics of all tenants


APP_SCOPES = frozenset(
    {
        *(Scope.JOBS_READ, Scope.JOBS_WRITE),
        *(Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE, Scope.ADAPTERS_SCORE),
        *(Scope.COHORTS_READ, Scope.COHORTS_WRITE),
        Scope.WEBHOOKS_WRITE,
    }
)
SERVER_SCOPES = frozenset({Scope.SERVER_READ, Scope.METRICS_READ})  # they reveal more than one tenant
_SCOPES_BY_ROLE = {Role.OPERATOR: frozenset(Scope), Role.APP: APP_SCOPES, Role.DEVICE: frozenset[Scope]()}


def allowed_scopes(role: Role) -> frozenset[Scope]:
    """Returns the largest set of scopes that a token of this role may have."""
    return _SCOPES_BY_ROLE[role]


def default_scopes(role: Role, tenant: str) -> frozenset[Scope]:
    """Returns the scopes of a new token. Scopes that reveal other tenants are limited to the default tenant."""
    return _SCOPES_BY_ROLE[role] if tenant == DEFAULT_TENANT else _SCOPES_BY_ROLE[role] - SERVER_SCOPES


class WhoAmI(StrictModel):
    """The identity and the scopes of the token that a request was sent with."""

    tenant: str
    role: Role
    token_id: str
    name: str
    user: str | None = Field(description="person that the token belongs to; null: a service or a device")
    device_id: str | None
    scopes: list[Scope]
    expires_at: datetime | None


class TokenRequest(StrictModel):
    """Request for a token in the caller's tenant. Its scopes cannot exceed the caller's."""

    name: str = Field("", max_length=96, description="display name")
    role: Literal[Role.OPERATOR, Role.APP] = Role.APP
    scopes: list[Scope] | None = Field(
        None, max_length=len(Scope), description="null: all scopes of the role that the caller has"
    )
    expires_in_days: Annotated[int, Field(ge=1, le=MAX_DAYS, strict=True)] | Literal["never"] | None = Field(
        None, description="null: the server's default lifetime"
    )
    user: str | None = Field(None, pattern=NAME, description="owner of the token; null: the caller's user")


class TokenView(StrictModel):
    """A token as lists show it, without its secret text."""

    id: str
    name: str
    role: Role
    scopes: list[Scope]
    user: str | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


class TokenGrant(StrictModel):
    """A new token. Its text is shown only in this response."""

    token: str
    view: TokenView
