"""The `mobizo-server` commands that create a home, and run the server and its workers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from server.cli.console import Json, complaints, moment, output, tell
from server.database.database import Database
from server.identity.signing_keys import service as keys
from server.identity.tokens import TOKEN_DAYS, TokenService
from server.logs import configure_logs
from server.schema import upgrade
from server.settings import Settings
from server.storage.opening import open_artifacts
from shared.access import DEFAULT_TENANT, Role
from shared.errors import BadRequest, Conflict

app = typer.Typer()


@app.command()
def init(as_json: Json = False) -> None:
    """Set up a home: create the database, a signing key and an operator token, which is shown only once."""
    settings = Settings()
    if settings.key_path.exists():
        raise Conflict(f"{settings.home} is already set up; create more tokens with `mobizo-server token create`")
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    open_artifacts(settings)
    database = Database(settings.url, settings.tuning)
    upgrade(database.engine)
    _protect(settings)
    keys.create_key(settings.key_path)
    with database.writing() as session:
        token, text = TokenService(session).issue(
            Role.OPERATOR, DEFAULT_TENANT, "init", lifetime=timedelta(days=TOKEN_DAYS)
        )
    value = {
        "home": str(settings.home),
        "tenant": DEFAULT_TENANT,
        "role": Role.OPERATOR,
        "token": text,
        "expires_at": moment(token.expires_at),
    }
    tell(as_json, value, f"{settings.home} is set up. Operator token (it cannot be shown again):\n{text}")


def _protect(settings: Settings) -> None:
    """Makes database and files readable by this user only, also in a directory that others may enter."""
    for path in settings.home.glob("mobizo.sqlite3*"):
        path.chmod(0o600)
    settings.artifacts_path.mkdir(mode=0o700, exist_ok=True)
    settings.artifacts_path.chmod(0o700)


@app.command()
def run(
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: MOBIZO_HOST or 127.0.0.1.")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on; default: MOBIZO_PORT or 8000; 0: any free port."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, max=64, help="Worker processes to start; 0: workers run on other machines.")
    ] = 1,
    tls_cert: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Private key, PEM.")] = None,
    insecure_dev: Annotated[
        bool, typer.Option("--insecure-dev", help="Allow unsafe settings, such as remote clients without TLS.")
    ] = False,
) -> None:
    """Serve the API and run compile workers until interrupted."""
    from server.operations.safety import Tls, Unsafe, check_safe
    from server.serving import serve

    configure_logs()
    settings = Settings()
    settings = settings.model_copy(
        update={"host": host or settings.host, "port": settings.port if port is None else port}
    )
    if (tls_cert is None) != (tls_key is None):
        raise BadRequest("--tls-cert and --tls-key must be given together")
    tls = Tls(tls_cert, tls_key) if tls_cert and tls_key else None
    try:
        unsafe = check_safe(settings, tls, insecure_dev)
    except Unsafe as error:
        complaints.print(f"error: {error.detail}", style="red", markup=False)
        raise typer.Exit(2) from error
    if insecure_dev:
        complaints.print("INSECURE: --insecure-dev is set; do not use this server with real data", style="bold red")
    for danger in unsafe:
        complaints.print(f"INSECURE: {danger}", style="bold red", markup=False)
    asyncio.run(serve(settings, tls, workers, lambda url: output.print(f"mobizo-server is listening on {url}")))


@app.command()
def worker() -> None:
    """Run a worker for the server that shares this home, until interrupted."""
    from server.worker import main as work

    work()
