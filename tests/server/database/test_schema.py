"""A new database has the schema that the models describe, on both databases, and migrations lead to the same one."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, select, text

from server.database.database import Database
from server.database.schema import SchemaBehind, check_current, lacking, migrating, release
from server.identity.tenants import Tenant
from server.schema import METADATA, prepare, upgrade
from server.storage.store import ONLY_ROW, GarbageCollection
from shared.canonical import sha256_hex
from tests.server.conftest import BOTH

DATABASES = BOTH
PROCESSES = 4
OF_DBOS = {
    "application_versions",
    "dbos_migrations",
    "notifications",
    "operation_outputs",
    "queues",
    "streams",
    "workflow_events",
    "workflow_events_history",
    "workflow_input",
    "workflow_output",
    "workflow_schedules",
    "workflow_status",
}


@pytest.fixture
def database(empty_url):
    new_database = Database(empty_url)
    yield new_database
    new_database.close()


def differences(database):
    """What alembic would still change."""
    options = {"compare_type": True, "include_name": lambda name, kind, _: kind != "table" or name not in OF_DBOS}
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, METADATA)


def tables(database):
    """Names of all tables but those that DBOS migrates itself, which are in a schema of their own on PostgreSQL."""
    return set(inspect(database.engine).get_table_names()) - OF_DBOS


def indexes(database):
    """Names of all indexes; those of conditions and of descending columns are not compared by alembic everywhere."""
    inspector = inspect(database.engine)
    return {index["name"] for table in METADATA.tables for index in inspector.get_indexes(table)}


def test_models_and_migrations_agree(database):
    upgrade(database.engine)
    assert differences(database) == []
    assert indexes(database) >= {index.name for table in METADATA.tables.values() for index in table.indexes}


def test_there_is_a_way_back_from_each_migration_and_forth_again(database):
    upgrade(database.engine)
    for revision in release()[-2::-1]:
        with migrating(database.engine) as config:
            command.downgrade(config, revision)
        upgrade(database.engine)
        assert differences(database) == [], revision


def test_committed_migrations_do_not_change():
    """A database that has applied a migration never applies it again: every change is a new migration.

    A new migration is added to migrations.json with its sha256; the digests of the others stay.
    """
    directory = files("server.database.migrations") / "versions"
    digests = {file.name: sha256_hex(file.read_bytes()) for file in directory.iterdir() if file.name[:4].isdigit()}
    assert digests == json.loads((Path(__file__).parent / "migrations.json").read_text())


def test_many_processes_may_start_at_once(database):
    def start(number):
        own_database = Database(str(database.engine.url))
        upgrade(own_database.engine)
        own_database.close()

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(start, range(PROCESSES)))
    assert differences(database) == []
    with database.reading() as session:
        assert session.scalars(text("SELECT version_num FROM alembic_version")).all() == [release()[-1]]


def test_an_empty_database_lacks_every_migration(database):
    with database.engine.connect() as connection:
        assert lacking(connection) == release()
        with pytest.raises(SchemaBehind, match="mobizo-server migrate"):
            check_current(connection)
    with pytest.raises(SchemaBehind):
        prepare(database.engine, migrate=False)
    assert tables(database) == set()


def test_an_empty_database_is_brought_up_with_the_rows_that_are_always_there(database):
    prepare(database.engine, migrate=True)
    assert tables(database) == {*METADATA.tables, "alembic_version"}
    with database.reading() as session:
        assert session.scalars(select(Tenant.name)).all() == ["default"]
        assert session.scalars(select(GarbageCollection.number)).all() == [ONLY_ROW]


def test_a_database_of_a_newer_release_is_served_and_never_changed(database):
    upgrade(database.engine)
    with database.engine.execution_options(writes=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    prepare(database.engine, migrate=True)
    with pytest.raises(Exception, match="9999"):
        upgrade(database.engine)
    with database.reading() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
