"""The worker process: compiles programs, makes versions of cohorts' rounds, sends webhooks, and does periodic work.

`python -m server.worker`, with the server's settings in the environment. This module registers what each feature
contributes; `server.tasks.worker` runs it. It imports neither torch nor uvicorn.
"""

from __future__ import annotations

import signal

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.aggregation import AggregationHandler
from server.federation.sweep import ROUNDS, watch_rounds
from server.identity.devices.repository import NonceRepository
from server.identity.signing_keys.service import load_key
from server.jobs.leases.service import take_back_overdue
from server.jobs.sweeps import SERIES, continue_series, purge_events
from server.logs import configure_logs
from server.programs.compilation import CompileHandler
from server.registry.purge import purge_adapters, sign_backlog
from server.settings import Settings
from server.storage.garbage_collection import Collector
from server.storage.opening import open_artifacts
from server.tasks.sweeps import EVERY_MINUTE, EVERY_TEN_MINUTES, EVERY_TWO_SECONDS
from server.tasks.worker import Worker
from server.web.idempotency import purge_records
from server.webhooks.delivery import WebhookHandler, request_deliveries
from server.wiring import wire


def create_worker(settings: Settings, database: Database) -> Worker:
    """A worker with the handlers and sweeps of all features."""
    wire()
    worker, artifacts = Worker(settings, database), open_artifacts(settings)
    load_key(settings.key_path)
    worker.handle(
        CompileHandler(settings, artifacts),
        AggregationHandler(settings, database, artifacts),
        WebhookHandler(settings),
    )
    stopping = worker.stopping.is_set
    worker.sweep("leases", EVERY_MINUTE, lambda: take_back_leases(database))
    worker.sweep("expired", EVERY_MINUTE, lambda: purge_expired(database))
    worker.sweep(ROUNDS, EVERY_TWO_SECONDS, lambda: watch_rounds(database, artifacts))
    worker.sweep("webhooks", EVERY_TWO_SECONDS, lambda: request_deliveries(database))
    worker.sweep(SERIES, EVERY_MINUTE, lambda: continue_series(database, artifacts))
    worker.sweep("workspaces", EVERY_MINUTE, artifacts.remove_abandoned_workspaces)
    worker.sweep("signing", EVERY_TEN_MINUTES, lambda: sign_backlog(database, settings, stopping))
    worker.sweep("adapters", EVERY_TEN_MINUTES, lambda: purge_adapters(database, settings.adapter_grace, stopping))
    worker.sweep("events", EVERY_TEN_MINUTES, lambda: purge_events(database, settings.event_days, stopping))
    collector = Collector(database, artifacts, stopping)
    worker.sweep("files", EVERY_TEN_MINUTES, lambda: collector.collect_if_due(settings))
    return worker


def take_back_leases(database: Database) -> None:
    """Jobs of devices that fell silent wait for another device, or fail."""
    with database.writing() as session:
        take_back_overdue(session)


def purge_expired(database: Database) -> None:
    """Removes the nonces of signed requests and the stored responses whose time is over."""
    with database.writing() as session:
        NonceRepository(session).purge(utc_now())
        purge_records(session, utc_now())


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
