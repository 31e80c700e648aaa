"""Every table of the server, and how a database gets and keeps them.

`METADATA` is complete once this module is imported. A new database is created from it; migrations change a database of
an earlier release.
"""

from __future__ import annotations

from alembic import command
from sqlalchemy import Engine, insert

from server.catalog import bases
from server.catalog.calibrations import service as calibrations
from server.dashboard import sessions
from server.database.columns import Table, utc_now
from server.database.schema import check_current, lacking, migrating, reached, release
from server.federation import models as cohorts
from server.federation.privacy import repository as privacy
from server.federation.secure_aggregation import repository as secure_aggregation
from server.identity import audit, tenants, tokens
from server.identity.devices import repository as devices
from server.identity.devices import service as enrollment
from server.identity.signing_keys import service as signing_keys
from server.jobs import repository as jobs
from server.jobs.leases import repository as leases
from server.jobs.scheduling import repository as queue
from server.programs import service as programs
from server.registry import models as adapters
from server.registry import ratings
from server.registry.trajectories import service as trajectories
from server.storage import store as artifacts
from server.tasks import repository as tasks
from server.tasks import sweeps
from server.web import idempotency
from server.webhooks import repository as webhooks
from shared.access import DEFAULT_TENANT

_MODULES = (
    *(adapters, artifacts, audit, bases, calibrations, cohorts, devices, enrollment, idempotency, jobs, leases),
    *(privacy, programs, queue, ratings, secure_aggregation, sessions, signing_keys, sweeps, tasks, tenants, tokens),
    *(trajectories, webhooks),
)
METADATA = Table.metadata
# The columns of all tables that reference stored files.
FILE_COLUMNS: tuple[artifacts.FileColumn, ...] = tuple(
    column for module in _MODULES for column in getattr(module, "FILES", ())
)


def upgrade(engine: Engine) -> None:
    """Creates all tables in an empty database, or applies the missing migrations. Concurrent callers wait.

    The tables of the work queue's library are created or upgraded first, by the library itself.
    """
    # Imported where it runs, because most commands migrate nothing and the import takes about a second.
    from dbos import DBOS

    DBOS.migrate(engine.url.render_as_string(hide_password=False))
    with migrating(engine) as config:
        connection = config.attributes["connection"]
        if lacking(connection) != release():
            command.upgrade(config, "head")
            return
        METADATA.create_all(connection)
        one_row = {"number": artifacts.ONLY_ROW, "deleted": 0, "freed_bytes": 0}
        connection.execute(insert(artifacts.GarbageCollection).values(one_row))
        connection.execute(insert(tenants.Tenant).values(name=DEFAULT_TENANT, created_at=utc_now()))
        command.stamp(config, "head")


def prepare(engine: Engine, migrate: bool | None) -> None:
    """Upgrades the schema of a database, or checks it. migrate: whether to upgrade; None: only SQLite is upgraded.

    Raises SchemaBehind, or Unavailable if the database cannot be reached.
    """
    with reached(engine) as connection:
        if not lacking(connection):
            return
    if migrate is None:
        migrate = engine.dialect.name == "sqlite"
    if migrate:
        upgrade(engine)
    with reached(engine) as connection:
        check_current(connection)
