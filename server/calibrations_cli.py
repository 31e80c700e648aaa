"""`mobizo-server calibrations`: what recipes may take A from. Knows no rules of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.artifacts.opening import open_artifacts
from server.calibrations.repository import CalibrationRepository
from server.calibrations.service import CalibrationService
from server.console import Json, open_home, output, tell, tell_rows
from server.db.paging import PageRequest
from shared.errors import BadRequest

app = typer.Typer()
calibrations = typer.Typer(help="Calibrations that recipes may take A from.", no_args_is_help=True)
app.add_typer(calibrations, name="calibrations")

COLUMNS = ("sha256", "base", "kind", "task", "examples", "modules", "width", "size")


@calibrations.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="a file that `mobizo-server calibrate` made")], as_json: Json = False
) -> None:
    """Let jobs of every tenant name a calibration."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file} cannot be read ({error.strerror})") from error
    settings, database = open_home()
    artifacts = open_artifacts(settings)
    with database.writing() as session:
        found = CalibrationService(session, artifacts).register(data)
        view = CalibrationRepository(session).views([found])[0]
    tell(as_json, view.model_dump(mode="json"), f"jobs on {view.base} may say recipe.calibration {view.sha256}")


@calibrations.command("list")
def list_calibrations(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="at most so many, the newest")] = 100,
    as_json: Json = False,
) -> None:
    """List calibrations, newest first."""
    _, database = open_home()
    with database.reading() as session:
        repository = CalibrationRepository(session)
        views = repository.views(repository.page(PageRequest(None, limit)).rows)
    tell_rows(as_json, [view.model_dump(mode="json") for view in views], COLUMNS)


@calibrations.command("remove")
def remove(sha256: Annotated[str, typer.Argument(help="its sha256, or how that begins")]) -> None:
    """Forget a calibration that no adapter, cohort or unfinished job takes its A from."""
    settings, database = open_home()
    with database.writing() as session:
        removed = CalibrationService(session, open_artifacts(settings)).remove(sha256).sha256
    output.print(f"{removed} is removed; programs that were compiled with it stay", markup=False)
