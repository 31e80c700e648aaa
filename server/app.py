"""The wiring: settings become an application. Knows every slice and none of their rules; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.types import Lifespan

from server.adapters import changes, rules
from server.adapters import endpoints as adapters
from server.artifacts.opening import open_artifacts
from server.assignments import endpoints as assignments
from server.auth import endpoints as access
from server.calibrations import endpoints as calibrations
from server.clock import utc_now
from server.cohorts import endpoints as cohorts
from server.db.database import Database
from server.db.revisions import prepare
from server.devices import endpoints as devices
from server.devices import joining
from server.formats import endpoints as formats
from server.history import endpoints as history
from server.http.envelope import Envelope
from server.http.openapi import describe
from server.http.place import Place
from server.http.problems import add_problem_handlers
from server.hub import endpoints as hub
from server.info import endpoints as info
from server.jobs import endpoints as jobs
from server.keys import load_key
from server.leases import endpoints as leases
from server.masking import endpoints as masking
from server.metrics import endpoints as metrics
from server.metrics.meter import Meter
from server.privacy import endpoints as privacy
from server.programs import endpoints as programs
from server.runners import endpoints as runners
from server.scoring import endpoints as scoring
from server.settings import Settings
from server.succession import endpoints as succession
from server.succession.service import prepare_keys
from server.work.engine import prepare_engine

API_VERSION = "1"  # of the routes under /v1; the release is what GET /v1/server says
# The Hub's addresses begin with names of tenants, so they come after all others.
SLICES = (
    info,
    succession,
    metrics,
    access,
    devices,
    joining,
    jobs,
    leases,
    masking,
    privacy,
    programs,
    runners,
    calibrations,
    adapters,
    changes,
    rules,
    assignments,
    cohorts,
    formats,
    scoring,
    history,
    hub,
)


def create_api(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The routes alone, which need no home: enough to describe the API."""
    app = FastAPI(
        title="mobizo",
        version=API_VERSION,
        description="Personalizes language models on the devices that hold the data, with forward passes only.",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    for slice_ in SLICES:
        # Not `include_router`: what is included is looked through route by route for each request, which takes longer
        # than many of our answers. Nothing here changes a route by including it.
        app.router.routes += slice_.router.routes
    add_problem_handlers(app)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]  # the documented way to extend it
    return app


def create_app(settings: Settings) -> FastAPI:
    """The application over a home that `mobizo-server init` made; its schema is brought up to date.

    Raises Unavailable if the home has no signing key, SchemaBehind if its database is for others to bring up.
    """
    key = load_key(settings.key_path)
    database = Database(settings.url, settings.tuning)
    prepare(database.engine, settings.migrate_at_start)
    prepare_keys(database, settings)
    prepare_engine(database, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        place: Place = app.state.place
        noting = asyncio.create_task(place.uses.keep_writing(place.database))
        if settings.scorer == "eager":
            await place.scorer.start()
        yield
        await place.scorer.close()
        noting.cancel()
        await run_in_threadpool(place.uses.write, place.database)
        database.close()

    app = create_api(lifespan)
    app.state.place = Place(settings, database, open_artifacts(settings), key.public_key(), utc_now())
    app.add_middleware(Envelope, settings=settings)
    app.add_middleware(Meter)
    return app
