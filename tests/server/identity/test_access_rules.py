"""Tokens that open nothing, and what is kept of tokens. Who may ask which route: test_matrix.py."""

import pytest
from sqlalchemy import select, text

from server.database.columns import utc_now
from server.identity.tokens import ALIVE, HOLDERS, Token, TokenService


@pytest.mark.parametrize("value", [None, "Bearer", "Basic eDp5", f"Bearer mobizo-app-{'x' * 43}"])
def test_tokens_that_are_none(fleet, problem, value):
    answer = fleet.actor().get("/v1/jobs", headers={"Authorization": value} if value else {})
    problem(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_digests_are_stored(home):
    with home.database.writing() as session:
        token, text = TokenService(session).issue("app", "default", "mine")
        assert len(token.digest) == 64
    with home.database.reading() as session:
        row = str(session.execute(select(Token.__table__).where(Token.id == token.id)).one())
    assert token.digest in row
    assert text.removeprefix("mobizo-app-") not in row


@pytest.mark.both_databases
def test_a_token_is_looked_up_by_indexes_alone(home):
    home.token("app")
    with home.database.reading() as session:
        bind = session.get_bind()
        explain = "EXPLAIN QUERY PLAN " if bind.dialect.name == "sqlite" else "EXPLAIN "
        if bind.dialect.name == "postgresql":
            session.execute(text("SET LOCAL enable_seqscan = off"))  # a small table is read faster whole
        for statement, values in ((HOLDERS, {"digests": ["x"]}), (ALIVE, {"token": "x", "now": utc_now()})):
            query = statement.params(values).compile(bind, compile_kwargs={"literal_binds": True})
            plan = str(session.execute(text(explain + str(query))).all())
            assert "Seq Scan" not in plan, plan
            assert "SCAN" not in plan, plan
