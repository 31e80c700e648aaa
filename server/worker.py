"""The worker process: compiles programs, merges adapters, makes versions of cohorts' rounds, and does periodic work.

`python -m server.worker`, with the server's settings in the environment. This module registers what each feature
contributes; `server.tasks.worker` runs it. Imports neither torch nor a web framework.
"""

from __future__ import annotations

import signal

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.aggregation import AggregationHandler
from server.federation.sweep import RoundWatch
from server.identity.signing_keys.service import load_key
from server.jobs.leases.service import LeaseService
from server.jobs.retention import EventPurge
from server.logs import configure_logs
from server.programs.compilation import CompileHandler
from server.registry.exports.conversion import ConversionHandler
from server.registry.purge import AdapterPurge
from server.registry.unsigned_versions import Signing
from server.settings import Settings
from server.storage.garbage_collection import Collector, Housekeeping
from server.storage.opening import open_artifacts
from server.storage.store import ArtifactStore
from server.tasks.repository import TaskRepository
from server.tasks.worker import Worker
from server.wiring import wire


def create_worker(settings: Settings, database: Database) -> Worker:
    """A worker with the handlers and sweeps of all features."""
    wire()
    worker, artifacts = Worker(settings, database), open_artifacts(settings)
    load_key(settings.key_path)
    worker.handle(
        CompileHandler(settings, artifacts),
        ConversionHandler(settings, database, artifacts),
        AggregationHandler(settings, database, artifacts),
    )
    stopping = worker.stopping.is_set
    worker.sweep(lambda: take_back_leases(settings, database), urgent=True)
    worker.sweep(
        lambda: remove_workspaces(database, artifacts),
        AdapterPurge(database, settings.adapter_grace, stopping).look,
        Housekeeping(settings, Collector(database, artifacts, stopping)).look,
        Signing(database, settings, stopping).look,
        EventPurge(database, settings.event_days, stopping).look,
        RoundWatch(database, artifacts).look,
    )
    return worker


def take_back_leases(settings: Settings, database: Database) -> None:
    """Jobs of devices that fell silent wait for another device, or fail."""
    with database.writing() as session:
        LeaseService(session, settings.lease_seconds, settings.lease_attempts).take_back_overdue()


def remove_workspaces(database: Database, artifacts: ArtifactStore) -> None:
    """Removes the workspaces of workers that were killed; a workspace has its worker's id as its name."""
    # Listed first: a workspace is made after its task was claimed, so the worker of a live one is found below.
    names = artifacts.workspaces()
    if not names:
        return
    with database.reading() as session:
        holders = TaskRepository(session).holders(utc_now())
    for name in set(names) - holders:
        artifacts.remove_workspace(name)


def main() -> None:
    """A worker until SIGTERM or SIGINT."""
    configure_logs()
    settings = Settings()
    database = Database(settings.url, settings.tuning)
    worker = create_worker(settings, database)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    worker.run()
    database.close()


if __name__ == "__main__":
    main()
