"""The wiring: settings become an application. Knows every slice and none of their rules; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from server.adapters import endpoints as adapters
from server.artifacts.opening import open_artifacts
from server.clock import utc_now
from server.db.database import Database
from server.db.revisions import prepare
from server.devices import endpoints as devices
from server.devices import joining
from server.http.envelope import Envelope
from server.http.place import Place
from server.http.problems import PROBLEM_JSON, add_problem_handlers
from server.info import endpoints as info
from server.jobs import endpoints as jobs
from server.keys import load_key
from server.leases import endpoints as leases
from server.metrics import endpoints as metrics
from server.metrics.meter import Meter
from server.programs import endpoints as programs
from server.runners import endpoints as runners
from server.settings import Settings

_PROBLEM = {"description": "a problem document (RFC 9457)", "content": {PROBLEM_JSON: {}}}


def create_app(settings: Settings) -> FastAPI:
    """The application over a home that `mobizo-server init` made; its schema is brought up to date.

    Raises Unavailable if the home has no signing key, SchemaBehind if its database is for others to bring up.
    """
    key = load_key(settings.key_path)
    database = Database(settings.url)
    prepare(database.engine, settings.migrate_at_start)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        place: Place = app.state.place
        noting = asyncio.create_task(place.uses.keep_writing(place.database))
        yield
        noting.cancel()
        await run_in_threadpool(place.uses.write, place.database)
        database.close()

    app = FastAPI(
        title="mobizo",
        version=version("mobizo"),
        description="Personalizes language models on the devices that hold the data, with forward passes only.",
        lifespan=lifespan,
        responses={"4XX": _PROBLEM, "5XX": _PROBLEM},
    )
    app.state.place = Place(settings, database, open_artifacts(settings), key.public_key(), utc_now())
    app.add_middleware(Envelope, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Meter)
    add_problem_handlers(app)
    for slice_ in (info, metrics, devices, joining, jobs, leases, programs, runners, adapters):
        app.include_router(slice_.router)
    return app
