"""Makes the web application from the settings and the routes of all features. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.types import Lifespan

from server.catalog import endpoints as catalog
from server.dashboard import endpoints as dashboard
from server.database.columns import utc_now
from server.database.database import Database
from server.federation import endpoints as cohorts
from server.federation.privacy import endpoints as privacy
from server.federation.secure_aggregation import endpoints as secure_aggregation
from server.identity import endpoints as identity
from server.identity.devices import endpoints as devices
from server.identity.signing_keys.service import load_key, prepare_keys
from server.identity.tokens import make_last_used
from server.inference import endpoints as inference
from server.inference import openai_endpoints as openai
from server.inference.scorer import make_scorer
from server.jobs import endpoints as jobs
from server.jobs.events import EventFeed
from server.jobs.leases import endpoints as leases
from server.operations import health, metrics
from server.programs import endpoints as programs
from server.registry import decision_endpoints as decisions
from server.registry import device_adapters
from server.registry import endpoints as adapters
from server.registry.hub import endpoints as hub
from server.registry.trajectories import endpoints as trajectories
from server.results import endpoints as results
from server.schema import prepare
from server.settings import Settings
from server.storage.opening import open_artifacts
from server.tasks.requests import load_queue
from server.web.middleware import Envelope, Meter, add_problem_handlers
from server.web.openapi import describe
from server.web.state import AppState
from server.webhooks import endpoints as webhooks
from server.wiring import wire

API_VERSION = "1"  # of the routes under /v1; the release is what GET /v1/server says
# The Hub's addresses begin with names of tenants, so they come after all others.
SLICES = (
    health,
    metrics,
    identity,
    devices,
    jobs,
    leases,
    results,
    secure_aggregation,
    privacy,
    programs,
    catalog,
    adapters,
    decisions,
    device_adapters,
    cohorts,
    inference,
    openai,
    trajectories,
    webhooks,
    dashboard,
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
        docs_url=None,  # the dashboard's, which loads nothing from elsewhere
        redoc_url=None,
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
    wire()
    key = load_key(settings.key_path)
    database = Database(settings.url, settings.tuning)
    prepare(database.engine, settings.migrate_at_start)
    prepare_keys(database, settings)
    load_queue(database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state: AppState = app.state.mobizo
        noting = asyncio.create_task(state.get(make_last_used).keep_writing(state.database))
        if settings.scorer == "eager":
            state.get(make_scorer).start()
        yield
        await state.get(make_scorer).close()
        await state.get(EventFeed).close()
        noting.cancel()
        await run_in_threadpool(state.get(make_last_used).write, state.database)
        database.close()

    app = create_api(lifespan)
    app.state.mobizo = AppState(settings, database, open_artifacts(settings), key.public_key(), utc_now())
    app.add_middleware(Envelope)
    app.add_middleware(Meter)
    return app
