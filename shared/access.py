"""Who may do what, in words: roles, scopes, and what tokens look like from outside. Knows no HTTP, no database."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.job import NAME

MOST_DAYS = 3650  # of a token that ends at all
DEFAULT_TENANT = "default"  # whoever runs the server; every home has it


class Role(StrEnum):
    """What a token's holder is."""

    OPERATOR = "operator"  # runs the fleet of its tenant; may also do all that an app may
    APP = "app"
    DEVICE = "device"  # trains; has no scopes: its routes take devices only


class Scope(StrEnum):
    """One thing that a token of a person or a service may do, always within its tenant."""

    JOBS_READ = "jobs:read"  # jobs, and the programs that they were compiled to
    JOBS_WRITE = "jobs:write"  # submit and cancel
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"  # approve, promote, roll back, tag, deprecate and delete
    ADAPTERS_SCORE = "adapters:score"  # score and generate with them on the server
    COHORTS_READ = "cohorts:read"
    COHORTS_WRITE = "cohorts:write"  # make them, let users in and out, open and close rounds
    PRIVACY_WRITE = "privacy:write"  # users' budgets
    DEVICES_READ = "devices:read"
    DEVICES_WRITE = "devices:write"  # let devices in, change and revoke them
    TOKENS_WRITE = "tokens:write"  # list, make and revoke tokens
    SERVER_READ = "server:read"  # what the server uses
    METRICS_READ = "metrics:read"  # figures of every tenant together


APP_SCOPES = frozenset(
    {
        *(Scope.JOBS_READ, Scope.JOBS_WRITE),
        *(Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE, Scope.ADAPTERS_SCORE),
        *(Scope.COHORTS_READ, Scope.COHORTS_WRITE),
    }
)
SERVER_SCOPES = frozenset({Scope.SERVER_READ, Scope.METRICS_READ})  # they tell of more than one tenant
_OF_ROLE = {Role.OPERATOR: frozenset(Scope), Role.APP: APP_SCOPES, Role.DEVICE: frozenset[Scope]()}


def allowed_scopes(role: Role) -> frozenset[Scope]:
    """The most that a token of a role may have."""
    return _OF_ROLE[role]


def default_scopes(role: Role, tenant: str) -> frozenset[Scope]:
    """What a token of a role has unless it is given less: what tells of every tenant stays with the server's own."""
    return _OF_ROLE[role] if tenant == DEFAULT_TENANT else _OF_ROLE[role] - SERVER_SCOPES


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WhoAmI(_Wire):
    """Whose token a request bore, and what it may do."""

    tenant: str
    role: Role
    token_id: str
    name: str
    user: str | None = Field(description="the person it belongs to; null: a service or a device")
    device_id: str | None
    scopes: list[Scope]
    expires_at: datetime | None


class TokenRequest(_Wire):
    """Asks for a token in the maker's tenant, which may do no more than the maker's own."""

    name: str = Field("", max_length=96, description="for people to tell tokens apart")
    role: Literal[Role.OPERATOR, Role.APP] = Role.APP
    scopes: list[Scope] | None = Field(
        None, max_length=len(Scope), description="null: the role's, as far as the maker's reach"
    )
    expires_in_days: Annotated[int, Field(ge=1, le=MOST_DAYS, strict=True)] | Literal["never"] | None = Field(
        None, description="null: as long as the server's setting says"
    )
    user: str | None = Field(None, pattern=NAME, description="whose it is; null: as the maker's")


class TokenView(_Wire):
    """A token as lists show it: what it may do, never what it is."""

    id: str
    name: str
    role: Role
    scopes: list[Scope]
    user: str | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


class TokenGrant(_Wire):
    """A new token; its text is shown this once."""

    token: str
    view: TokenView
