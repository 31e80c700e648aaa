"""The `mobizo-server` commands for access control: tenants, users, tokens, and one-time tokens of devices."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer
from pydantic import ValidationError

from server.cli.console import Json, Tenant, moment, output, rows_of, tell, tell_rows, transaction
from server.identity.devices.service import DeviceService
from server.identity.quotas import Quota, QuotaService
from server.identity.tenants import TenantService, UserService
from server.identity.tokens import TOKEN_DAYS, TokenService
from server.operations.tenant_usage import tenant_usage
from shared.access import DEFAULT_TENANT, MAX_DAYS, Role, Scope
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.protocol import EnrollmentRequest

app = typer.Typer()
tenants = typer.Typer(
    help="Tenants: isolated customer accounts with their own jobs, devices and adapters.", no_args_is_help=True
)
TenantName = Annotated[str, typer.Argument(help="Name of the tenant.")]
UserName = Annotated[str, typer.Argument(help="Name of the user.")]
users = typer.Typer(help="Users of a tenant, who own tokens.", no_args_is_help=True)
tokens = typer.Typer(help="Tokens of operators and apps; `mobizo token` has the other commands.", no_args_is_help=True)
app.add_typer(tenants, name="tenant")
app.add_typer(users, name="user")
app.add_typer(tokens, name="token")
devices = typer.Typer(help="Devices that enroll; `mobizo device` has the other commands.", no_args_is_help=True)
app.add_typer(devices, name="device")

NEVER = "never"
DEFAULT_LIMIT = "default"
TENANT_COLUMNS = ("name", "created_at", "suspended_at")
USER_COLUMNS = ("id", "name", "role", "created_at", "disabled_at")
MAX_DIGITS = 18  # of a quota


@tenants.command("create")
def create_tenant(name: TenantName, as_json: Json = False) -> None:
    """Create a tenant."""
    with transaction(writing=True) as session:
        tenant = TenantService(session).create(name)
        value = {"name": tenant.name, "created_at": moment(tenant.created_at)}
    tell(as_json, value, f"{name} is a tenant")


@tenants.command("list")
def list_tenants(as_json: Json = False) -> None:
    """List tenants."""
    with transaction() as session:
        rows = rows_of(TenantService(session).all(), TENANT_COLUMNS)
    tell_rows(as_json, rows, TENANT_COLUMNS)


@tenants.command("view")
def view_tenant(name: TenantName, as_json: Json = False) -> None:
    """Show a tenant's quotas and how much of them is used."""
    with transaction() as session:
        TenantService(session).get(name)
        rows = [asdict(usage) for usage in tenant_usage(session, name)]
    tell_rows(as_json, rows, ("quota", "used", "limit", "default"))


@tenants.command("quota")
def set_quota(
    name: TenantName,
    quota: Annotated[Quota, typer.Argument(metavar="QUOTA", help=f"Quota to change: {', '.join(Quota)}.")],
    limit: Annotated[str, typer.Argument(help=f"Number, or `{DEFAULT_LIMIT}`.")],
) -> None:
    """Change a quota of a tenant. What exceeds the new limit is kept."""
    if limit != DEFAULT_LIMIT and not (limit.isascii() and limit.isdigit() and len(limit) <= MAX_DIGITS):
        raise BadRequest(f"LIMIT takes a number of at most {MAX_DIGITS} digits, or `{DEFAULT_LIMIT}`")
    with transaction(writing=True) as session:
        QuotaService(session).set_limit(name, quota, None if limit == DEFAULT_LIMIT else int(limit))
    output.print(f"the quota of {quota} of {name} is {limit}")


@tenants.command("suspend")
def suspend_tenant(name: TenantName) -> None:
    """Deny access to a tenant's apps, operators and devices immediately. Nothing is deleted."""
    with transaction(writing=True) as session:
        TenantService(session).suspend(name)
    output.print(f"{name} is suspended")


@tenants.command("resume")
def resume_tenant(name: TenantName) -> None:
    """Restore access for a suspended tenant."""
    with transaction(writing=True) as session:
        TenantService(session).resume(name)
    output.print(f"{name} is active again")


@users.command("create")
def create_user(
    name: UserName,
    role: Annotated[Role, typer.Option(help="Operator or app: limits the scopes of the user's tokens.")],
    tenant: Tenant = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Create a user. `mobizo-server token create --user` creates a token for the user."""
    with transaction(writing=True) as session:
        user = UserService(session).create(tenant, name, role)
        value = {"id": user.id, "name": name, "tenant": tenant, "role": role}
    tell(as_json, value, f"{name} is an {role} of tenant {tenant}")


@users.command("list")
def list_users(tenant: Tenant = DEFAULT_TENANT, as_json: Json = False) -> None:
    """List a tenant's users."""
    with transaction() as session:
        TenantService(session).get(tenant)
        rows = rows_of(UserService(session).all(tenant), USER_COLUMNS)
    tell_rows(as_json, rows, USER_COLUMNS)


@users.command("disable")
def disable_user(name: UserName, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Disable a user: all tokens of the user stop working immediately."""
    with transaction(writing=True) as session:
        UserService(session).disable(tenant, name)
    output.print(f"{name} is disabled")


def _lifetime(text: str | None) -> timedelta | None:
    if text == NEVER:
        return None
    if text is None:
        return timedelta(days=TOKEN_DAYS)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_DAYS:
        raise BadRequest(f"--expires-in-days takes 1 to {MAX_DAYS}, or `{NEVER}`")
    return timedelta(days=int(text))


@tokens.command("create")
def create_token(
    role: Annotated[
        Role | None, typer.Option(help="Operator or app. Default: the role of --user. Devices enroll instead.")
    ] = None,
    tenant: Tenant = DEFAULT_TENANT,
    name: Annotated[str, typer.Option(help="Label shown in the list of tokens.")] = "",
    user: Annotated[str | None, typer.Option(help="User who owns the token. Default: a service token.")] = None,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="Allowed scope; repeatable. Default: the scopes of the role.")
    ] = None,
    expires_in_days: Annotated[
        str | None, typer.Option(help=f"Number of days, or `{NEVER}`. Default: {TOKEN_DAYS}.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It cannot be shown again."""
    lifetime = _lifetime(expires_in_days)
    with transaction(writing=True) as session:
        token, text = TokenService(session).make(tenant, role, name, scopes=scope or None, lifetime=lifetime, user=user)
        value = {
            "id": token.id,
            "role": token.role,
            "tenant": tenant,
            "scopes": sorted(token.scopes),
            "expires_at": moment(token.expires_at),
            "token": text,
        }
    tell(as_json, value, text)


@devices.command("enroll-token")
def enroll_token(
    tenant: Tenant = DEFAULT_TENANT,
    expires_in_seconds: Annotated[int, typer.Option(min=1, help="Lifetime of the token.")] = 3600,
    user: Annotated[
        list[str] | None,
        typer.Option(
            help="User whose data is on the device; repeatable; without one it gets no job until it is bound."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a one-time token that enrolls one device, which trains for the given users."""
    try:
        names = EnrollmentRequest(users=user or []).users
    except ValidationError as error:
        raise BadRequest(f"user: {first_invalid(error).message}") from error
    with transaction(writing=True) as session:
        enrollment = DeviceService(session).invite(tenant, expires_in_seconds, names)
    tell(as_json, enrollment.model_dump(mode="json"), enrollment.token)
