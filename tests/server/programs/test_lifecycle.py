"""A program's legal moves, and the jobs that go with it."""

import itertools

import pytest
from sqlalchemy import select

from server.programs.service import MOVES, Program, ProgramLifecycle, ProgramState
from shared.errors import Conflict

ILLEGAL = [pair for pair in itertools.product(ProgramState, repeat=2) if pair[1] not in MOVES[pair[0]]]


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_no_other_move(home, app, before, after):
    app.submit()
    with home.database.writing() as session:
        program = session.scalars(select(Program)).one()
        program.state = before
        with pytest.raises(Conflict, match="cannot become"):
            ProgramLifecycle(session).move(program, after)


def test_jobs_go_along(home, app):
    job, other = app.submit(), app.submit(adapter="other")
    seen = []
    for state in (ProgramState.COMPILING, ProgramState.PENDING, ProgramState.COMPILING, ProgramState.READY):
        with home.database.writing() as session:
            ProgramLifecycle(session).move(session.scalars(select(Program)).one(), state)
        seen.append({app.get(f"/v1/jobs/{each['id']}").json()["state"] for each in (job, other)})
    assert seen == [{"compiling"}, {"queued"}, {"compiling"}, {"ready"}]
