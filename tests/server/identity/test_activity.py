"""When a token was last used: noted at every request, written apart from them, kept while a database is away."""

from datetime import UTC, datetime, timedelta

import pytest

from server.database.database import Database
from server.identity.activity import LastUsed, make_last_used
from server.identity.tokens import Token

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def last_used(home):
    with home.database.reading() as session:
        return {token.number: token.last_used_at for token in session.query(Token)}


def test_a_request_is_noted_and_written_later(home, fleet, standing, app, operator):
    began = datetime.now(UTC)
    for _ in range(3):
        assert app.get("/v1/jobs").status_code == 200
    assert set(last_used(home).values()) == {None}
    standing[0].state.mobizo.get(make_last_used).write(home.database)
    moments = [moment for moment in last_used(home).values() if moment]
    assert len(moments) == 1
    assert began < moments[0] < datetime.now(UTC)
    shown = {item["id"]: item["last_used_at"] for item in operator.get("/v1/tokens").json()["items"]}
    assert datetime.fromisoformat(shown[app.get("/v1/whoami").json()["token_id"]]) == moments[0]


@pytest.mark.both_databases
def test_it_never_goes_back(home):
    home.token("app"), home.token("app")
    first, second = last_used(home)
    for moments in ({first: NOON}, {first: NOON - timedelta(hours=1), second: NOON}, {}):
        uses = LastUsed()
        for number, moment in moments.items():
            uses.note(number, moment)
        uses.write(home.database)
    assert last_used(home) == {first: NOON, second: NOON}


def test_a_database_that_is_away_loses_nothing(home, tmp_path):
    home.token("app")
    (number,) = last_used(home)
    uses = LastUsed()
    uses.note(number, NOON)
    away = Database(f"sqlite:///{tmp_path / 'nothing'}")
    uses.write(away)
    away.close()
    uses.write(home.database)
    assert last_used(home) == {number: NOON}
