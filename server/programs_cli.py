"""`mobizo-server programs`: what is compiled, and compiling it anew. Knows no rules of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from server.console import Json, moment, open_home, output, tell_rows
from server.db.paging import PageRequest
from server.programs.repository import ProgramRepository
from server.programs.service import ProgramService

app = typer.Typer()
programs = typer.Typer(help="Programs that recipes are compiled to.", no_args_is_help=True)
app.add_typer(programs, name="programs")

COLUMNS = ("recipe_id", "base", "state", "version", "attempts", "next_attempt_at", "memory_bytes", "doing", "error")


@programs.command("list")
def list_programs(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="at most so many, the newest")] = 100,
    as_json: Json = False,
) -> None:
    """List programs, newest first."""
    _, database = open_home()
    with database.reading() as session:
        found = ProgramRepository(session).page(PageRequest(None, limit)).rows
        rows = [
            {
                "recipe_id": program.recipe_id,
                "base": program.recipe.base.name,
                "state": program.state,
                "version": None if program.signed is None else program.signed.manifest.version,
                "attempts": program.attempts,
                "next_attempt_at": moment(program.next_attempt_at),
                "memory_bytes": program.memory_bytes,
                "doing": None if program.progress is None else program.progress.why,
                "error": None if program.error is None else program.error.detail,
            }
            for program in found
        ]
    tell_rows(as_json, rows, COLUMNS)


@programs.command("recompile")
def recompile(recipe_id: Annotated[str, typer.Argument(help="of the program")]) -> None:
    """Compile a program anew: its next version. Devices get it with their next lease; what trains goes on."""
    _, database = open_home()
    with database.writing() as session:
        program = ProgramService(session).recompile(recipe_id)
        version = 1 if program.signed is None else program.signed.manifest.version + 1
    output.print(f"version {version} of {recipe_id} waits for a worker", markup=False)
