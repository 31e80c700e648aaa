"""`bench registry`, scoring: rows of 64 adapters in one `POST /v1/score` against rows of one, on SmolLM2-135M.

Whole requests to a real `mobizo-server run`, by turns: rows of 64 adapters, of 8, of one, of none; claims are medians
over turns.
"""

import json
import random
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np

from bench.programs import MOVIES, model_file
from bench.registry.publish import Device, publish
from bench.result import Measured, Row
from bench.server.home import add_devices, client, job, make_home, new_token, running
from bench.timing import by_turns, ratio
from server.catalog.bases import BaseService, inspect
from server.database.database import Database
from server.settings import Settings
from server.storage.opening import open_artifacts
from shared.access import Role

ADAPTERS = 64  # as many rows
ROUNDS, QUICK_ROUNDS = 7, 3
SECONDS = 600.0
DEVIATION = 0.01  # of B's elements
SEED = 6
BASE = "smollm2"


def measure(quick: bool) -> Measured:
    """Returns a row for each number of adapters, and the ratios."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        settings = make_home(Path(name), signed_requests="none", scorer_seconds=SECONDS)
        register(settings, source)
        (credentials,), token = add_devices(settings, 1), new_token(settings, Role.APP)
        with running(settings) as (url, _), client(url, token, SECONDS) as app:
            with Device(url, credentials) as device:
                for number in range(ADAPTERS):
                    body = job(number, {"rank": 16}, base=BASE)
                    publish(app, device, np.random.default_rng(number), body, DEVIATION)
            register(settings, model_file())
            seconds = _score(app, [f"adapter-{number}" for number in range(ADAPTERS)], rounds)
            with client(url, new_token(settings, Role.OPERATOR)) as operator:
                metrics = operator.get("/metrics").raise_for_status().text
    about = {"what": "score", "rows": ADAPTERS}
    rows: list[Row] = [
        about | {"adapters": count, "seconds": statistics.median(times), "all_seconds": times}
        for count, times in seconds.items()
    ]
    resident = re.search(r"^mobizo_scorer_resident_bytes (\S+)$", metrics, re.MULTILINE)
    claims = {
        "score_64_vs_1": ratio(seconds[ADAPTERS], seconds[1]),
        "score_8_vs_1": ratio(seconds[8], seconds[1]),
        "score_1_vs_base": ratio(seconds[1], seconds[0]),
        "score_rss_bytes": float(resident[1]) if resident else 0.0,
    }
    return rows, claims


def register(settings: Settings, source: Path) -> None:
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


def _score(app: httpx.Client, names: list[str], rounds: int) -> dict[int, list[float]]:
    """Returns the seconds of requests with as many rows, by number of adapters and turn."""
    records = [json.loads(line) for line in (MOVIES / "test.jsonl").read_text().splitlines()]
    rng = random.Random(SEED)

    def scoring(count: int) -> Callable[[int], None]:
        def call(number: int) -> None:
            chosen = random.Random(f"{SEED}-{number}").sample(records, ADAPTERS)  # the same for all of a turn
            rows = [
                {"adapter": names[row % count] if count else None, "record": {"text": record["text"]}}
                for row, record in enumerate(chosen)
            ]
            rng.shuffle(rows)
            found = app.post("/v1/score", json={"base": BASE, "task": "sst2", "rows": rows}).raise_for_status()
            if len(found.json()["rows"]) != ADAPTERS:
                raise RuntimeError("rows are missing")

        return call

    counts = (ADAPTERS, 1, 8, 0)
    seconds = by_turns(rounds, {str(count): scoring(count) for count in counts})
    return {count: seconds[str(count)] for count in counts}
