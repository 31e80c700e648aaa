"""A server for benchmarks: a home with one base model, its tokens and devices, and `mobizo-server run` as a process.

The tests' fake compiler needs only a moment. Nothing is trained: devices only speak the protocol.
"""

import base64
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.result import Row
from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.identity.devices.repository import Device
from server.identity.devices.service import BindingService
from server.identity.signing_keys import service as keys
from server.identity.tokens import TokenService
from server.settings import Settings
from shared.access import DEFAULT_TENANT, Role
from shared.request_signature import RequestSigner
from shared.result import Result
from shared.signing import new_private_key, private_bytes, public_text
from tests.postgres import Postgres
from tests.server import actors, fake_compiler, homes
from tests.server.nginx import free_ports

BASE, DATASET = "tiny", "reviews"
TIMEOUT_SECONDS = 300.0
USERS = 20
RECIPE = {"rank": 2, "sequence_length": 16, "queries": 1, "effective_batch": 2}
RESULT = Result.model_validate(actors.result())


@dataclass(frozen=True)
class Credentials:
    """The token and the private key (base64) of one simulated device."""

    token: str
    key: str

    def signer(self) -> RequestSigner:
        """Returns the signer of the device's requests."""
        return RequestSigner(Ed25519PrivateKey.from_private_bytes(base64.b64decode(self.key)), time.time)

    def actor(self, url: str) -> actors.Actor:
        """Returns the device's HTTP client."""
        device = actors.Actor(url, self.token)
        device.signer = self.signer()
        return device


def job(number: int = 0, recipe: dict[str, Any] = RECIPE, **fields: Any) -> dict[str, Any]:
    """Returns the body of a job of one of `USERS` users."""
    owner = {"user": f"user-{number % USERS}", "adapter": f"adapter-{number}"}
    return {
        "base": BASE,
        "task": "sst2",
        "dataset": DATASET,
        "recipe": {"estimator": "replay"} | recipe,
        "training": {"steps": 3},
        **owner,
        **fields,
    }


def make_home(directory: Path, **settings: Any) -> Settings:
    """Creates a home like `mobizo-server init`, with one base. settings: fields of Settings."""
    source = directory / "source"
    directory.mkdir(parents=True, exist_ok=True)
    homes.write_source(source)
    (source / "behaviour.json").write_text(json.dumps({"seconds": 0.2}))
    limits: dict[str, Any] = dict.fromkeys(("token_rate", "address_rate"), 1e6)
    compiler = [sys.executable, fake_compiler.__file__]
    home_settings = Settings(
        home=directory / "home", migrate_at_start=True, compiler_command=compiler, **limits, **settings
    )
    home_settings.home.mkdir()
    keys.create_key(home_settings.key_path)
    homes.fill(home_settings, (source / "tokenizer.json").read_bytes())
    with homes.home_of(home_settings, source):  # which names the base's source
        return home_settings


@contextmanager
def both_databases(name: str, **settings: str) -> Iterator[tuple[tuple[str, str | None], ...]]:
    """Yields the databases to measure on, as pairs of kind and URL; SQLite has none. settings: of PostgreSQL."""
    postgres = Postgres(**settings).start()
    try:
        yield ("sqlite", None), ("postgresql", postgres.create(name))
    finally:
        postgres.remove()


def new_token(settings: Settings, role: Role, tenant: str = DEFAULT_TENANT) -> str:
    """Issues a token of a tenant, which is created if there is none."""
    with closing(homes.Home(settings, settings.home)) as home:
        return str(home.token(role, tenant))


def add_devices(settings: Settings, count: int) -> list[Credentials]:
    """Enrolls devices directly in the database, each with the data of every user of `job`."""
    database, credentials = Database(settings.url), []
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
            credentials.append(Credentials(token, base64.b64encode(private_bytes(key)).decode()))
    database.close()
    return credentials


class ServerProcess:
    """`mobizo-server run` in a session of its own. After a kill it can be started again on its port."""

    def __init__(self, settings: Settings, workers: int = 1) -> None:
        """Starts the server and waits until it answers."""
        (port,) = free_ports(1)
        self.url, self._log = f"http://127.0.0.1:{port}", settings.home.parent / "log"
        self._command = [sys.executable, "-m", "server.cli.main", "run", "--port", str(port), "--workers", str(workers)]
        self._environment = os.environ | settings.environment()
        self.start()
        self.wait_until_answers()

    def start(self) -> None:
        """Starts the process."""
        with self._log.open("ab") as output:
            self.process = psutil.Popen(
                self._command, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait_until_answers(self) -> None:
        """Raises RuntimeError if the server does not start."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz").status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the server does not answer: {self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """Stops the server."""
        with suppress(psutil.NoSuchProcess):
            self.process.terminate()
        try:
            self.process.wait(TIMEOUT_SECONDS)
        except psutil.TimeoutExpired:
            self.process.kill()


def submit(app: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Submits a job and waits until its program is compiled; returns the job."""
    response = app.post("/v1/jobs", json=body).raise_for_status().json()
    path, waiting = f"/v1/jobs/{response['id']}", ("queued", "compiling")
    homes.eventually(lambda: app.get(path).raise_for_status().json()["state"] not in waiting, TIMEOUT_SECONDS)
    return dict(response)


def spread(seconds: list[float]) -> Row:
    """Returns the count, and the 50th, 95th, 99th and 100th percentile in milliseconds."""
    p50, p95, p99, longest = (1000 * float(value) for value in np.quantile(seconds, (0.5, 0.95, 0.99, 1.0)))
    return {"count": len(seconds), "p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "max_ms": longest}
