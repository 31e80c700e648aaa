"""A server for benchmarks: a home with one base model, its tokens and devices, and `mobizo-server run` as a process.

The tests' compiler makes its programs in a moment. Nothing is trained here: devices only speak the protocol.
"""

import base64
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.database.schema import upgrade
from server.identity.devices.repository import Device
from server.identity.devices.service import BindingService
from server.identity.signing_keys import service as keys
from server.identity.tokens import TokenService
from server.schema import bases
from server.settings import Settings
from server.storage.opening import open_artifacts
from server.tasks.engine import prepare_engine
from server.wiring import wire
from shared.access import DEFAULT_TENANT, Role
from shared.job import Result
from shared.recipe import TARGETS
from shared.signing import new_private_key, private_bytes, public_text
from shared.zo.lora import BaseShape
from tests.postgres import Postgres
from tests.server import fake_compiler

BASE, DATASET = "tiny", "reviews"
PATIENCE = 300.0  # seconds
USERS = 20
_SMALL = {"layers": 2, "hidden": 8, "intermediate": 16, "heads": 2, "kv_heads": 1, "head_dim": 4, "vocabulary": 32}
_LARGE = {"layers": 22, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 4, "head_dim": 64}
SMALL = BaseShape(architecture="llama", context_length=64, **_SMALL)
TINYLLAMA = BaseShape(architecture="llama", context_length=2048, vocabulary=32000, **_LARGE)
RECIPE = {"rank": 2, "sequence_length": 16, "queries": 1, "effective_batch": 2}
ALL_TARGETS = {"rank": 16, "targets": list(TARGETS), "sequence_length": 16}  # D = 6.3 million on TINYLLAMA
RESULT = Result(
    steps=3,
    best_step=2,
    train_seconds=1,
    seconds=2,
    peak_rss_bytes=1000,
    train_examples=10,
    truncated_examples=0,
    zero_shot_accuracy=0.5,
    tuned_accuracy=0.75,
)


@dataclass(frozen=True)
class Credentials:
    """The token and the private key (base64) of one simulated device."""

    token: str
    key: str


def job(number: int = 0, recipe: dict[str, Any] = RECIPE, **fields: Any) -> dict[str, Any]:
    """Returns the body of a job of one of `USERS` users."""
    who = {"user": f"user-{number % USERS}", "adapter": f"adapter-{number}"}
    return {
        "base": BASE,
        "task": "sst2",
        "dataset": DATASET,
        "recipe": {"estimator": "replay"} | recipe,
        "training": {"steps": 3},
        **who,
        **fields,
    }


def make_home(directory: Path, shape: BaseShape = SMALL, **settings: Any) -> Settings:
    """Creates a home like `mobizo-server init`, with one base of this shape. settings: fields of Settings."""
    source = directory / "source"
    source.mkdir(parents=True)
    words = {word: number for number, word in enumerate(("[UNK]", "It", "was", "terrible", "great"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "shape.json").write_text(shape.model_dump_json())
    (source / "behaviour.json").write_text(json.dumps({"seconds": 0.2}))
    chosen = Settings(
        home=directory / "home",
        migrate_at_start=True,
        compiler_command=[sys.executable, fake_compiler.__file__],
        token_rate=1e6,
        address_rate=1e6,
        refusal_rate=1e6,
        **settings,
    )
    wire()
    chosen.home.mkdir()
    keys.create_key(chosen.key_path)
    database = Database(chosen.url)
    upgrade(database.engine)
    prepare_engine(database, chosen)
    with database.writing() as session:
        session.add(
            bases.BaseModelEntry(
                name=BASE,
                source=str(source),
                sha256="b" * 64,
                shape=shape,
                parameters=1000,
                tokenizer_sha256=open_artifacts(chosen).put((source / "tokenizer.json").read_bytes()),
                created_at=utc_now(),
            )
        )
    database.close()
    return chosen


@contextmanager
def both_databases(name: str, **settings: str) -> Iterator[tuple[tuple[str, str | None], ...]]:
    """Yields the databases to measure on, as pairs of kind and URL; SQLite has none. settings: of PostgreSQL."""
    postgres = Postgres(**settings).start()
    try:
        yield ("sqlite", None), ("postgresql", postgres.create(name))
    finally:
        postgres.remove()


def new_token(settings: Settings, role: Role) -> str:
    """Issues a token of the default tenant."""
    database = Database(settings.url)
    with database.writing() as session:
        text = TokenService(session).issue(role, DEFAULT_TENANT, "bench")[1]
    database.close()
    return text


def add_devices(settings: Settings, count: int) -> list[Credentials]:
    """Enrolls devices directly in the database, each with the data of every user of `job`."""
    database, found = Database(settings.url), []
    with database.writing() as session:
        for number in range(count):
            key = new_private_key()
            device = Device(
                id=new_id("device"),
                tenant=DEFAULT_TENANT,
                name=f"device-{number}",
                public_key=public_text(key.public_key()),
                platform="linux",
                created_at=utc_now(),
            )
            session.add(device)
            session.flush()
            BindingService(session).bind(device, [f"user-{user}" for user in range(USERS)])
            _, token = TokenService(session).issue(Role.DEVICE, DEFAULT_TENANT, device.name, device.id)
            found.append(Credentials(token, base64.b64encode(private_bytes(key)).decode()))
    database.close()
    return found


def start_server(settings: Settings, log: Path, port: int = 0, workers: int = 1) -> psutil.Popen:
    """Starts `mobizo-server run` in a session of its own; its output goes to `log`."""
    command = [sys.executable, "-m", "server.cli.main", "run", "--port", str(port), "--workers", str(workers)]
    environment = os.environ | settings.environment() | {"PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        return psutil.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


@contextmanager
def running(settings: Settings) -> Iterator[tuple[str, psutil.Process]]:
    """Runs a server with one worker; yields its URL and its process."""
    log = settings.home.parent / "log"
    process = start_server(settings, log)
    try:
        while not (url := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"the server ended: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield url[0], process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        try:
            process.wait(20)
        except psutil.TimeoutExpired:
            process.kill()


def client(url: str, token: str, seconds: float = 60) -> httpx.Client:
    """Returns an HTTP client with a token. seconds: timeout."""
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=seconds)


def submit(app: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Submits a job and waits until its program is compiled; returns the job."""
    found = app.post("/v1/jobs", json=body).raise_for_status().json()
    deadline = time.monotonic() + PATIENCE
    while app.get(f"/v1/jobs/{found['id']}").raise_for_status().json()["state"] in ("queued", "compiling"):
        if time.monotonic() > deadline:
            raise RuntimeError("the program is not compiled")
        time.sleep(0.1)
    return dict(found)


def peak_memory(pid: int) -> int:
    """Returns the highest resident set of a process, bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0
