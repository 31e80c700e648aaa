"""The `mobizo-server` maintenance commands: `doctor`, `migrate`, `backup`, `restore` and garbage collection."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from server.cli.console import Json, open_home, output, tell
from server.database.database import Database
from server.database.schema import lacking, reached, release, upgrade
from server.operations.backups.manifest import BackupManifest
from server.settings import Settings
from server.storage.garbage_collection import Collector
from server.storage.opening import open_artifacts
from shared.errors import BadRequest, MobizoError, Unavailable

app = typer.Typer()


@app.command()
def doctor(
    tls_cert: Annotated[Path | None, typer.Option(help="certificate chain that is passed to `run`, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="private key, PEM")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="skip the compiler check, which takes several seconds")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check everything a working server needs and print one line per check. Exits with status 1 if a check fails."""
    from server.operations.doctor import examine
    from server.schema import METADATA

    if (tls_cert is None) != (tls_key is None):
        raise BadRequest("--tls-cert and --tls-key must be given together")
    failed = []
    for check in examine(Settings(), tls_cert, tls_key, quick, METADATA):
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
    target: Annotated[Path, typer.Argument(help="directory or .tar file to create")],
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="include the signing keys; then protect the backup like the keys")
    ] = False,
    as_json: Json = False,
) -> None:
    """Back up the database and the stored files. The server keeps running."""
    from server.operations.backups.service import back_up

    settings, database = open_home()
    database.close()
    manifest = back_up(settings, target, with_keys)
    text = f"{target}: the database and {len(manifest.files)} files, {manifest.size:,} bytes"
    directory = settings.key_path.parent
    keys = "with the signing keys" if with_keys else f"without the signing keys: back up {directory} separately"
    tell(as_json, _summary(manifest, target), f"{text}, {keys}")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="directory or .tar file created by `backup`", exists=True)],
    as_json: Json = False,
) -> None:
    """Restore a backup into an empty home, database and store. Every file is verified."""
    from server.operations.backups import service

    settings = Settings()
    manifest = service.restore(settings, source)
    text = f"{settings.home} is restored to {manifest.made_at:%Y-%m-%d %H:%M:%S} UTC: {len(manifest.files)} files"
    if not manifest.keys:
        text += f". The backup has no signing key: copy the saved key into {settings.key_path.parent}"
    tell(as_json, _summary(manifest, settings.home), text)


def _summary(manifest: BackupManifest, path: Path) -> dict[str, object]:
    return {
        "path": str(path),
        "made_at": manifest.made_at.isoformat(),
        "version": manifest.version,
        "files": len(manifest.files),
        "bytes": manifest.size,
        "keys": len(manifest.keys),
    }


@app.command("gc")
def collect(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="report what would be removed without removing it")
    ] = False,
    grace_hours: Annotated[
        float | None,
        typer.Option(
            min=0, help="minimum age of an unreferenced file; default: MOBIZO_COLLECT_GRACE_HOURS or 24 hours"
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
    if result.leftovers:
        text += f", and {result.leftovers} incomplete files"
    tell(as_json, {**asdict(result), "dry_run": dry_run}, text)
