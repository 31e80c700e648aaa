"""`mobizo-server`'s commands for who looks after it: `doctor`, `migrate`, `backup`, `restore`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from server.console import Json, output, tell
from server.db.database import Database
from server.db.revisions import lacking, reached, release
from server.db.schema import upgrade
from server.settings import Settings
from shared.errors import BadRequest, MobizoError, Unavailable

app = typer.Typer()


@app.command()
def doctor(
    tls_cert: Annotated[Path | None, typer.Option(help="certificate chain that `run` will be given, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its private key, PEM")] = None,
    as_json: Json = False,
) -> None:
    """Look at all that a working server needs, one line each; status 1 if anything fails."""
    from server.doctor import examine

    if (tls_cert is None) != (tls_key is None):
        raise BadRequest("--tls-cert and --tls-key go together")
    failed = []
    for check in examine(Settings(), tls_cert, tls_key):
        output.print(json.dumps(asdict(check)) if as_json else check.line(), markup=False)
        if check.state == "fail":
            failed.append(check.name)
    if failed:
        raise MobizoError(f"failed: {', '.join(failed)}")


@app.command()
def migrate(as_json: Json = False) -> None:
    """Bring the database's schema up to this release; once, before its servers are started or replaced."""
    settings = Settings()
    database = Database(settings.url)
    if database.engine.dialect.name == "sqlite" and not settings.home.is_dir():
        raise Unavailable(f"there is no home at {settings.home}; run `mobizo-server init` first")
    with reached(database.engine) as connection:
        applied = lacking(connection)
    upgrade(database.engine)
    database.close()
    told = f"{len(applied)} migrations applied" if applied else "the database was up to date"
    tell(as_json, {"applied": list(applied), "revision": release()[-1]}, told)
