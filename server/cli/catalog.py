"""`mobizo-server program` and `calibration`: lists and recompiles programs; registers, lists, removes calibrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.catalog.calibrations.service import CalibrationRepository, CalibrationService, register_file
from server.cli.console import Json, open_home, output, tell, tell_rows, transaction
from server.database.paging import PageRequest
from server.programs.service import ProgramRepository, ProgramService
from server.storage.opening import open_artifacts
from shared.errors import BadRequest

app = typer.Typer()
programs = typer.Typer(help="Programs compiled from recipes.", no_args_is_help=True)
app.add_typer(programs, name="program")
calibrations = typer.Typer(help="Calibrations from which recipes may take A.", no_args_is_help=True)
app.add_typer(calibrations, name="calibration")

Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")]
PROGRAM_COLUMNS = ("recipe_id", "base", "state", "version", "doing", "error")
CALIBRATION_COLUMNS = ("sha256", "base", "kind", "task", "examples", "modules", "width", "size")


@programs.command("list")
def list_programs(limit: Limit = 100, as_json: Json = False) -> None:
    """List programs, newest first."""
    with transaction() as session:
        newest = ProgramRepository(session).page(PageRequest(None, limit)).rows
        rows = [
            {
                "recipe_id": program.recipe_id,
                "base": program.recipe.base.name,
                "state": program.state,
                "version": None if program.signed is None else program.signed.manifest.version,
                "doing": None if program.progress is None else program.progress.why,
                "error": None if program.error is None else program.error.detail,
            }
            for program in newest
        ]
    tell_rows(as_json, rows, PROGRAM_COLUMNS)


@programs.command("recompile")
def recompile(recipe_id: Annotated[str, typer.Argument(help="Recipe id of the program.")]) -> None:
    """Recompile a program as its next version. Devices get it with their next lease; running jobs continue."""
    with transaction(writing=True) as session:
        program = ProgramService(session).recompile(recipe_id)
        version = 1 if program.signed is None else program.signed.manifest.version + 1
    output.print(f"version {version} of {recipe_id} is queued for a worker", markup=False)


@calibrations.command("add")
def add_calibration(
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
def list_calibrations(limit: Limit = 100, as_json: Json = False) -> None:
    """List calibrations, newest first."""
    with transaction() as session:
        repository = CalibrationRepository(session)
        views = repository.views(repository.page(PageRequest(None, limit)).rows)
    tell_rows(as_json, [view.model_dump(mode="json") for view in views], CALIBRATION_COLUMNS)


@calibrations.command("remove")
def remove_calibration(
    sha256: Annotated[str, typer.Argument(help="The calibration's sha256, or a prefix of it.")],
) -> None:
    """Remove a calibration that no adapter, cohort or unfinished job uses."""
    settings, database = open_home()
    with database.writing() as session:
        removed = CalibrationService(session, open_artifacts(settings)).remove(sha256).sha256
    output.print(f"{removed} is removed; programs compiled with it remain available", markup=False)
