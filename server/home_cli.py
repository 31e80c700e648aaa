"""`mobizo-server`'s commands that need a home: set up, run and look after a server. Knows no rules of its own."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from server import keys
from server.artifacts.opening import open_artifacts
from server.auth.models import Role
from server.auth.service import TokenService
from server.bases.repository import BaseRepository
from server.bases.service import BaseService, inspect
from server.console import Json, Tenant, complaints, moment, open_home, output, tell, tell_rows
from server.db.database import Database
from server.db.schema import upgrade
from server.devices.service import DeviceService
from server.logs import configure_logs
from server.settings import Settings
from server.work.engine import prepare_engine
from shared.access import DEFAULT_TENANT
from shared.errors import BadRequest, Conflict

app = typer.Typer()
bases = typer.Typer(help="Base models that jobs may name.", no_args_is_help=True)
app.add_typer(bases, name="bases")


@app.command()
def init(as_json: Json = False) -> None:
    """Set up a home: database, signing key, and an operator's token, shown once."""
    settings = Settings()
    if settings.key_path.exists():
        raise Conflict(f"{settings.home} is set up already; `mobizo-server tokens create` makes more tokens")
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    open_artifacts(settings)
    database = Database(settings.url, settings.tuning)
    upgrade(database.engine)
    prepare_engine(database, settings)
    keys.create_key(settings.key_path)
    with database.writing() as session:
        token, text = TokenService(session).issue(
            Role.OPERATOR, DEFAULT_TENANT, "init", lifetime=timedelta(days=settings.token_days)
        )
    value = {
        "home": str(settings.home),
        "tenant": DEFAULT_TENANT,
        "role": Role.OPERATOR,
        "token": text,
        "expires_at": moment(token.expires_at),
    }
    tell(as_json, value, f"{settings.home} is set up. The operator's token, shown this once:\n{text}")


@app.command()
def run(
    host: Annotated[str | None, typer.Option(help="address to listen on; default MOBIZO_HOST or 127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="default MOBIZO_PORT or 8000; 0: a free one")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, max=64, help="worker processes; 0: they run elsewhere")] = 1,
    tls_cert: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="certificate chain, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="its private key, PEM")] = None,
    insecure_dev: Annotated[
        bool, typer.Option("--insecure-dev", help="go on with what is unsafe, such as other hosts without TLS")
    ] = False,
) -> None:
    """Serve the API, with workers that compile, until interrupted."""
    from server.safety import Tls, Unsafe, check_safe
    from server.serving import serve

    configure_logs()
    settings = Settings()
    settings = settings.model_copy(
        update={"host": host or settings.host, "port": settings.port if port is None else port}
    )
    if (tls_cert is None) != (tls_key is None):
        raise BadRequest("--tls-cert and --tls-key go together")
    tls = Tls(tls_cert, tls_key) if tls_cert and tls_key else None
    try:
        unsafe = check_safe(settings, tls, insecure_dev)
    except Unsafe as error:
        complaints.print(f"error: {error.detail}", style="red", markup=False)
        raise typer.Exit(2) from error
    if insecure_dev:
        complaints.print("INSECURE: --insecure-dev is given; never let people's data near this", style="bold red")
    for danger in unsafe:
        complaints.print(f"INSECURE: {danger}", style="bold red", markup=False)
    asyncio.run(serve(settings, tls, workers, lambda url: output.print(f"mobizo-server answers on {url}")))


@app.command()
def worker() -> None:
    """Compile programs for the server that shares this home, until interrupted."""
    from server.worker import main as work

    work()


@app.command("enrol-token")
def enrol_token(
    tenant: Tenant = DEFAULT_TENANT,
    expires_in_seconds: Annotated[int, typer.Option(min=1, help="how long it may be used")] = 3600,
    as_json: Json = False,
) -> None:
    """Make a one-time token with which one device may enrol."""
    _, database = open_home()
    with database.writing() as session:
        enrolment = DeviceService(session).invite(tenant, expires_in_seconds)
    tell(as_json, enrolment.model_dump(mode="json"), enrolment.token)


@bases.command("add")
def add_base(
    name: Annotated[str, typer.Argument(help="what jobs will call it")],
    source: Annotated[str, typer.Argument(help="Hugging Face directory or id, or a .gguf file")],
    as_json: Json = False,
) -> None:
    """Read a base model's configuration and tokenizer, and let jobs name it."""
    settings, database = open_home()
    artifacts = open_artifacts(settings)
    found = inspect(name, source, artifacts)
    with database.writing() as session:
        base = BaseService(session, artifacts).register(found)
    value = {"name": base.name, "source": base.source, "sha256": base.sha256, "parameters": base.parameters}
    tell(as_json, value, f"{base.name}: {base.shape.architecture}, {base.parameters:,} parameters, {base.sha256}")


@bases.command("list")
def list_bases(as_json: Json = False) -> None:
    """List base models."""
    columns = ("name", "parameters", "sha256", "source")
    _, database = open_home()
    with database.reading() as session:
        rows = [{column: getattr(base, column) for column in columns} for base in BaseRepository(session).all()]
    tell_rows(as_json, rows, columns)
