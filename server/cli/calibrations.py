"""`mobizo-server calibration`: registers, lists and removes calibrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.catalog.calibrations.service import CalibrationRepository, CalibrationService, register_file
from server.cli.console import Json, open_home, output, tell, tell_rows, transaction
from server.database.paging import PageRequest
from server.storage.opening import open_artifacts
from shared.errors import BadRequest

app = typer.Typer()
calibrations = typer.Typer(help="Calibrations from which recipes may take A.", no_args_is_help=True)
app.add_typer(calibrations, name="calibration")

COLUMNS = ("sha256", "base", "kind", "task", "examples", "modules", "width", "size")


@calibrations.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="File created by `mobizo-server calibrate`.")], as_json: Json = False
) -> None:
    """Register a calibration, so that jobs of every tenant may use it."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file} cannot be read ({error.strerror})") from error
    settings, database = open_home()
    artifacts = open_artifacts(settings)
    view = register_file(database, artifacts, data)
    text = f"jobs on {view.base} may now set recipe.calibration to {view.sha256}"
    tell(as_json, view.model_dump(mode="json"), text)


@calibrations.command("list")
def list_calibrations(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")] = 100,
    as_json: Json = False,
) -> None:
    """List calibrations, newest first."""
    with transaction() as session:
        repository = CalibrationRepository(session)
        views = repository.views(repository.page(PageRequest(None, limit)).rows)
    tell_rows(as_json, [view.model_dump(mode="json") for view in views], COLUMNS)


@calibrations.command("remove")
def remove(sha256: Annotated[str, typer.Argument(help="The calibration's sha256, or a prefix of it.")]) -> None:
    """Remove a calibration that no adapter, cohort or unfinished job uses."""
    settings, database = open_home()
    with database.writing() as session:
        removed = CalibrationService(session, open_artifacts(settings)).remove(sha256).sha256
    output.print(f"{removed} is removed; programs compiled with it remain available", markup=False)
