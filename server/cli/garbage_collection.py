"""`mobizo-server gc`: removes unreferenced files."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from server.cli.console import Json, open_home, tell
from server.storage.garbage_collection import Collector
from server.storage.opening import open_artifacts

app = typer.Typer()


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
    """Remove stored files that no program, base, adapter, runner build or upload references, while servers run."""
    settings, database = open_home()
    grace = timedelta(hours=settings.collect_grace_hours if grace_hours is None else grace_hours)
    result = Collector(database, open_artifacts(settings)).collect(grace, dry_run=dry_run)
    verb = "would be" if dry_run else "were"
    text = f"{result.deleted} of {result.files} files ({result.freed_bytes:,} bytes) {verb} removed"
    if result.leftovers:
        text += f", and {result.leftovers} incomplete files"
    tell(as_json, {**asdict(result), "dry_run": dry_run}, text)
