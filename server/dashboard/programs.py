"""Pages of compiled programs: the queue of compilations, their durations, and the sizes of the results."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response

from server.dashboard.access import signed_in
from server.dashboard.pages import Visitor
from server.dashboard.routes import PageRoutes
from server.jobs.repository import JobRepository
from server.programs.service import ACCESS, Program
from server.web.pages import Paging
from server.web.state import Reading
from shared.access import Scope
from shared.errors import NotFound

router = PageRoutes(prefix="/ui/programs")
Reader = Annotated[Visitor, signed_in(Scope.JOBS_READ)]


def seconds_of(program: Program) -> float | None:
    """Returns how long the latest compilation of a program took; None: it is not compiled."""
    if program.ready_at is None or program.started_at is None or program.ready_at < program.started_at:
        return None
    return (program.ready_at - program.started_at).total_seconds()


@router.get("")
def programs(visitor: Reader, session: Reading, paging: Paging) -> Response:
    """The programs that the tenant's jobs use, newest first."""
    rows = JobRepository(session).programs_page(visitor.principal.tenant, paging)
    listing = paging.page([(program, seconds_of(program)) for program in rows.rows], rows.before)
    return visitor.page("programs.html", "Programs", listing=listing)


@router.get("/{recipe_id}")
def program(visitor: Reader, recipe_id: str, session: Reading) -> Response:
    """One program: its recipe, and its files."""
    compiled = ACCESS.get().program_of_tenant(session, visitor.principal.tenant, recipe_id)
    if compiled is None:
        raise NotFound(f"there is no program of recipe {recipe_id[:80]!r} that a job of this tenant uses")
    return visitor.page(
        "program.html",
        f"Program {recipe_id[:12]}",
        program=compiled,
        seconds=seconds_of(compiled),
        manifest=None if compiled.signed is None else compiled.signed.manifest,
        recipe_json=compiled.recipe.model_dump_json(indent=2),
    )
