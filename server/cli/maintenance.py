"""The `mobizo-server` maintenance commands: `doctor`, `migrate`, `backup` and garbage collection."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from server.cli.console import Json, open_home, output, tell
from server.database.database import Database
from server.database.schema import lacking, reached, release
from server.schema import METADATA, upgrade
from server.settings import Settings
from server.storage.garbage_collection import Collector
from server.storage.opening import open_artifacts
from shared.errors import MobizoError, Unavailable

app = typer.Typer()


@app.command()
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the compiler check, which takes several seconds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check everything a working server needs and print one line per check. Exits with status 1 if a check fails."""
    from server.operations.doctor import examine

    failed = []
    for check in examine(Settings(), quick, METADATA):
        output.print(json.dumps(asdict(check)) if as_json else check.line(), markup=False)
        if check.state == "fail":
            failed.append(check.name)
    if failed:
        raise MobizoError(f"failed: {', '.join(failed)}")


@app.command()
def migrate(as_json: Json = False) -> None:
    """Upgrade the database schema to this release. Run it once, before servers are started or replaced."""
    settings = Settings()
    database = Database(settings.url, settings.tuning)
    if database.engine.dialect.name == "sqlite" and not settings.home.is_dir():
        raise Unavailable(f"there is no home at {settings.home}; run `mobizo-server init` first")
    with reached(database.engine) as connection:
        applied = lacking(connection)
    upgrade(database.engine)
    database.close()
    text = f"{len(applied)} migrations applied" if applied else "the database is already up to date"
    tell(as_json, {"applied": list(applied), "revision": release()[-1]}, text)


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="Directory to create.")],
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="Include the signing keys; then protect the backup like the keys.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy a home with SQLite, which stays in use. The copy is a home itself; PostgreSQL is backed up by pg_dump."""
    from server.operations.backup import back_up

    settings, database = open_home()
    database.close()
    files = back_up(settings, target, with_keys)
    directory = settings.key_path.parent
    keys = "with the signing keys" if with_keys else f"without the signing keys: back up {directory} separately"
    tell(as_json, {"path": str(target), "files": files}, f"{target}: the database and {files} files, {keys}")


@app.command("gc")
def collect(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be removed without removing it.")
    ] = False,
    grace_hours: Annotated[
        float | None,
        typer.Option(
            min=0, help="Minimum age of an unreferenced file. Default: MOBIZO_COLLECT_GRACE_HOURS or 24 hours."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove stored files that no program, base, adapter or upload references, while servers run."""
    settings, database = open_home()
    grace = timedelta(hours=settings.collect_grace_hours if grace_hours is None else grace_hours)
    result = Collector(database, open_artifacts(settings)).collect(grace, dry_run=dry_run)
    verb = "would be" if dry_run else "were"
    text = f"{result.deleted} of {result.files} files ({result.freed_bytes:,} bytes) {verb} removed"
    tell(as_json, {**asdict(result), "dry_run": dry_run}, text)
