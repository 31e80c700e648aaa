"""The migrations make the schema that the models describe."""

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from server.db.database import Database
from server.db.schema import METADATA, devices, leases, upgrade


def test_models_and_migrations_agree(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    upgrade(database.engine)
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    database.close()


def test_upgrading_twice_changes_nothing(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    upgrade(database.engine)
    upgrade(database.engine)
    assert "jobs" in inspect(database.engine).get_table_names()
    database.close()


def test_there_is_a_way_back(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    upgrade(database.engine)
    config = Config()
    config.set_main_option("script_location", "server:migrations")
    with database.engine.execution_options(writes=True).begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]
    database.close()


def test_an_older_home_is_brought_up_with_what_it_holds(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    config = Config()
    config.set_main_option("script_location", "server:migrations")
    with database.engine.execution_options(writes=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(
            text(
                "INSERT INTO devices (id, tenant, name, public_key, platform, created_at) "
                "VALUES ('device_1', 'default', 'phone', 'k', 'linux', '2026-01-01 00:00:00.000000')"
            )
        )
    upgrade(database.engine)
    with database.reading() as session:
        device = session.query(devices.Device).one()
        assert (device.id, device.revoked_at) == ("device_1", None)
        assert session.query(leases.MemoryDecline).count() == 0
    database.close()
