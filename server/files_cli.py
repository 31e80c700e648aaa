"""`mobizo-server gc`: removes files that nothing names."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from server.artifacts.collection import Collector
from server.artifacts.opening import open_artifacts
from server.console import Json, open_home, tell

app = typer.Typer()


@app.command("gc")
def collect(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what would go, and remove nothing")] = False,
    grace_hours: Annotated[
        float | None,
        typer.Option(min=0, help="age from which an unnamed file goes; default MOBIZO_COLLECT_GRACE_HOURS or 24"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove stored files that no program, base, adapter, runner or upload under way names; servers may run on."""
    settings, database = open_home()
    grace = timedelta(hours=settings.collect_grace_hours if grace_hours is None else grace_hours)
    found = Collector(database, open_artifacts(settings)).collect(grace, dry_run=dry_run)
    verb = "would be" if dry_run else "were"
    told = f"of {found.files} files {found.deleted} ({found.freed_bytes:,} bytes) {verb} removed"
    if found.leftovers:
        told += f", and {found.leftovers} that were never whole"
    tell(as_json, {**asdict(found), "dry_run": dry_run}, told)
