"""When a server says that it can serve."""

from dataclasses import replace

import pytest
from sqlalchemy import text

from server.database.database import Database


@pytest.fixture
def ready(fleet, standing):
    """Asks with parts of the place exchanged; the names of what fails."""
    app, _ = standing
    actor = fleet.actor()

    def ready(settings=None, **parts):
        state = app.state.mobizo
        if settings is not None:
            parts["settings"] = state.settings.model_copy(update=settings)
        app.state.mobizo = replace(state, **parts)
        response = actor.get("/readyz")
        app.state.mobizo = state
        if response.status_code == 200:
            assert response.json() == {"status": "ok"}
            return []
        document = response.json()
        assert (response.status_code, document["code"]) == (503, "not-ready")
        assert response.headers["retry-after"]
        assert actor.get("/healthz").json() == {"status": "ok"}
        assert str(state.settings.home) not in response.text
        return document["failing"]

    return ready


def test_each_thing_that_can_be_wrong(ready, home, tmp_path, monkeypatch):
    assert ready() == []
    with monkeypatch.context() as full:
        full.setattr("server.operations.health.DISK_FLOOR_BYTES", 10**18)
        assert ready() == ["disk"]
    (home.settings.artifacts_path / "staging").rmdir()
    assert ready() == ["files"]
    (home.settings.artifacts_path / "staging").mkdir()
    home.settings.key_path.chmod(0o644)
    assert ready() == ["key"]
    home.settings.key_path.chmod(0o600)
    missing_database = Database(f"sqlite:///{tmp_path}/no/where/x.sqlite3")
    assert ready(database=missing_database) == ["database"]
    missing_database.close()
    with home.database.writing() as session:
        revision = session.scalar(text("SELECT version_num FROM alembic_version"))
        session.execute(text("DELETE FROM alembic_version"))
    assert ready() == ["database"]
    with home.database.writing() as session:
        session.execute(text("INSERT INTO alembic_version VALUES ('of a later release')"))
    assert ready() == []
    with home.database.writing() as session:  # for the tests that use this database next
        session.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def test_a_server_that_stops_takes_no_more(ready, standing):
    standing[0].state.mobizo.shutdown.begin()
    assert ready() == ["shutdown"]
