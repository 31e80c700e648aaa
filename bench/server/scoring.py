"""`bench server`, scoring: 64 adapters in one `/v1/score` request against one adapter with as many rows.

Adapters on SmolLM2-135M, each with a B of its own, are published through the routes of a device and scored by turns.
"""

import json
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bench.programs import MOVIES, model_file
from bench.result import Measurement
from bench.runner import ratio, time_by_turns
from bench.server import home
from server.catalog.bases import BaseService, inspect
from server.database.database import Database
from server.settings import Settings
from server.storage.opening import open_artifacts
from shared.access import Role
from tests.server.actors import Actor

ADAPTERS = 64  # as many rows
ROUNDS, QUICK_ROUNDS = 7, 2
SECONDS = 600.0  # timeout of a client's request
VALUE = 1e-4  # of all elements of the first adapter's B; the second has twice as much, and so on
SEED = 6
BASE = "smollm2"


def measure(quick: bool) -> Measurement:
    """Returns no rows, and the ratio."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        settings = home.make_home(Path(name))
        _register(settings, source)
        (credentials,), token = home.add_devices(settings, 1), home.new_token(settings, Role.APP)
        with closing(home.ServerProcess(settings)) as server, Actor(server.url, token) as app:
            app.timeout = SECONDS
            with credentials.actor(server.url) as device:
                for number in range(ADAPTERS):
                    home.submit(app, home.job(number, {"rank": 16}, base=BASE))
                    device.finish(device.lease(home.DATASET), VALUE * (number + 1))
            _register(settings, model_file())
            seconds = _score(app, QUICK_ROUNDS if quick else ROUNDS)
    return [], {"score_64_vs_1": ratio(seconds[str(ADAPTERS)], seconds["1"])}


def _register(settings: Settings, source: Path) -> None:
    """Registers SmolLM2-135M in a home. source: the model, or a directory for the tests' compiler."""
    database, artifacts = Database(settings.url), open_artifacts(settings)
    base = inspect(BASE, str(model_file()), artifacts)
    if source.is_dir():
        (source / "shape.json").write_text(base.shape.model_dump_json())
        (source / "tokenizer.json").write_bytes(artifacts.read(base.tokenizer_sha256))
    base.source = str(source)
    with database.writing() as session:
        BaseService(session, artifacts).register(base)
    database.close()


def _score(app: Actor, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of requests with ADAPTERS rows, for each number of adapters and each turn."""
    records = [json.loads(line) for line in (MOVIES / "test.jsonl").read_text().splitlines()]

    def make_call(count: int) -> Callable[[int], None]:
        def call(number: int) -> None:
            # All calls of a turn have the same sample.
            sample = random.Random(f"{SEED}-{number}").sample(records, ADAPTERS)
            rows = [
                {"adapter": f"adapter-{row % count}", "record": {"text": record["text"]}}
                for row, record in enumerate(sample)
            ]
            response = app.post("/v1/score", json={"base": BASE, "task": "sst2", "rows": rows}).raise_for_status()
            if len(response.json()["rows"]) != ADAPTERS:
                raise RuntimeError("rows are missing")

        return call

    return time_by_turns(rounds, {str(count): make_call(count) for count in (ADAPTERS, 1)})
