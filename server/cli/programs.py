"""`mobizo-server program`: lists and recompiles programs."""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli.console import Json, output, tell_rows, transaction
from server.database.paging import PageRequest
from server.programs.service import ProgramRepository, ProgramService

app = typer.Typer()
programs = typer.Typer(help="Programs compiled from recipes.", no_args_is_help=True)
app.add_typer(programs, name="program")

COLUMNS = ("recipe_id", "base", "state", "version", "doing", "error")


@programs.command("list")
def list_programs(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")] = 100,
    as_json: Json = False,
) -> None:
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
    tell_rows(as_json, rows, COLUMNS)


@programs.command("recompile")
def recompile(recipe_id: Annotated[str, typer.Argument(help="Recipe id of the program.")]) -> None:
    """Recompile a program as its next version. Devices get it with their next lease; running jobs continue."""
    with transaction(writing=True) as session:
        program = ProgramService(session).recompile(recipe_id)
        version = 1 if program.signed is None else program.signed.manifest.version + 1
    output.print(f"version {version} of {recipe_id} is queued for a worker", markup=False)
