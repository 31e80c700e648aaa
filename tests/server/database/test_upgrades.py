"""Bringing a database up to this release: from empty, and what happens with a database of a newer release."""

import pytest
from sqlalchemy import inspect, select, text

from server.database.database import Database
from server.database.schema import SchemaBehind, check_current, lacking, prepare, release, upgrade
from server.identity.tenants import Tenant
from server.schema import METADATA
from server.storage.references import THE_ONE, GarbageCollection
from tests.server.conftest import BOTH

DATABASES = BOTH


@pytest.fixture
def database(empty_url):
    found = Database(empty_url)
    yield found
    found.close()


def test_an_empty_database_lacks_every_migration(database):
    with database.engine.connect() as connection:
        assert lacking(connection) == release()
        with pytest.raises(SchemaBehind, match="mobizo-server migrate"):
            check_current(connection)
    with pytest.raises(SchemaBehind):
        prepare(database.engine, migrate=False)
    assert inspect(database.engine).get_table_names() == []


def test_an_empty_database_is_brought_up_with_the_rows_that_are_always_there(database):
    prepare(database.engine, migrate=True)
    assert set(inspect(database.engine).get_table_names()) == {*METADATA.tables, "alembic_version"}
    with database.reading() as session:
        assert session.scalars(select(Tenant.name)).all() == ["default"]
        assert session.scalars(select(GarbageCollection.number)).all() == [THE_ONE]


def test_a_database_of_a_newer_release_is_served_and_never_changed(database):
    upgrade(database.engine)
    with database.engine.execution_options(writes=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    prepare(database.engine, migrate=True)
    with pytest.raises(Exception, match="9999"):
        upgrade(database.engine)
    with database.reading() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
