"""`mobizo-server`'s commands for who looks after it: `doctor`, `migrate`, `backup`, `restore`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from server.backups.manifest import BackupManifest
from server.console import Json, open_home, output, tell
from server.db.database import Database
from server.db.revisions import lacking, reached, release
from server.db.schema import upgrade
from server.settings import Settings
from server.work.engine import prepare_engine
from shared.errors import BadRequest, MobizoError, Unavailable

app = typer.Typer()


@app.command()
def doctor(
    tls_cert: Annotated[Path | None, typer.Option(help="certificate chain that `run` will be given, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its private key, PEM")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="leave out the compiler, which takes seconds to load")] = False,
    as_json: Json = False,
) -> None:
    """Look at all that a working server needs, one line each; status 1 if anything fails."""
    from server.doctor import examine

    if (tls_cert is None) != (tls_key is None):
        raise BadRequest("--tls-cert and --tls-key go together")
    failed = []
    for check in examine(Settings(), tls_cert, tls_key, quick):
        output.print(json.dumps(asdict(check)) if as_json else check.line(), markup=False)
        if check.state == "fail":
            failed.append(check.name)
    if failed:
        raise MobizoError(f"failed: {', '.join(failed)}")


@app.command()
def migrate(as_json: Json = False) -> None:
    """Bring the database's schema up to this release; once, before its servers are started or replaced."""
    settings = Settings()
    database = Database(settings.url, settings.tuning)
    if database.engine.dialect.name == "sqlite" and not settings.home.is_dir():
        raise Unavailable(f"there is no home at {settings.home}; run `mobizo-server init` first")
    with reached(database.engine) as connection:
        applied = lacking(connection)
    upgrade(database.engine)
    prepare_engine(database, settings)
    database.close()
    told = f"{len(applied)} migrations applied" if applied else "the database was up to date"
    tell(as_json, {"applied": list(applied), "revision": release()[-1]}, told)


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="a new directory, or a new file that ends in .tar")],
    with_keys: Annotated[bool, typer.Option("--with-keys", help="also the signing keys: guard it like them")] = False,
    as_json: Json = False,
) -> None:
    """Copy database and files to one place while the server runs; nothing has to stop."""
    from server.backups.service import back_up

    settings, database = open_home()
    database.close()
    manifest = back_up(settings, target, with_keys)
    told = f"{target}: the database and {len(manifest.files)} files, {manifest.size:,} bytes"
    keys = "with the signing keys" if with_keys else f"without the signing keys: keep {settings.key_path.parent} apart"
    tell(as_json, _told(manifest, target), f"{told}, {keys}")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="what `backup` made", exists=True)], as_json: Json = False
) -> None:
    """Fill an empty home, database and store from a backup; every part is checked."""
    from server.backups import service

    settings = Settings()
    manifest = service.restore(settings, source)
    told = f"{settings.home} is as it was at {manifest.made_at:%Y-%m-%d %H:%M:%S} UTC: {len(manifest.files)} files"
    if not manifest.keys:
        told += f". It has no signing key yet: put the one that you kept back into {settings.key_path.parent}"
    tell(as_json, _told(manifest, settings.home), told)


def _told(manifest: BackupManifest, place: Path) -> dict[str, object]:
    return {
        "path": str(place),
        "made_at": manifest.made_at.isoformat(),
        "version": manifest.version,
        "files": len(manifest.files),
        "bytes": manifest.size,
        "keys": len(manifest.keys),
    }
