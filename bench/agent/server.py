"""The tests' fake server with a device enrolled: it offers one job until the job is completed, or none."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.programs import Compiled
from device_agent.home import HOME_VARIABLE, AgentHome, DeviceConfig
from shared.job import TrainingSettings
from shared.protocol import LeaseRequest
from shared.signing import key_id, new_private_key, public_text
from tests.device_agent.fake_server import FakeServer

DATASET, JOB = "movies", "job-1"


class LongPollServer(FakeServer):
    """Holds a request for work as long as the device allows, like the server does."""

    def _leases(self, body: bytes, parts: list[str]) -> object:
        found = super()._leases(body, parts)
        if found is None:
            self.changed.wait_for(lambda: self.jobs, LeaseRequest.model_validate_json(body).wait_seconds)
        return found


@contextmanager
def fake_server(
    directory: Path, program: Compiled | None = None, training: TrainingSettings | None = None
) -> Iterator[tuple[LongPollServer, AgentHome]]:
    """Yields the server, and the home of a device enrolled there. program: of the one job."""
    key = new_private_key()
    with LongPollServer(key, lease_seconds=5.0) as server:
        if program is not None and training is not None:
            server.add_job(program, DATASET, JOB, **training.model_dump(exclude_unset=True))
        home, public = AgentHome(directory), key.public_key()
        home.create()
        about = {"server": server.url, "name": "bench", "device_id": "device-1", "token": "token"}
        home.enroll(DeviceConfig(**about, public_key=public_text(public), key_id=key_id(public)))
        yield server, home


def start_agent(
    home: AgentHome, dataset: Path, *options: str, log: Path = Path(os.devnull), **environment: str
) -> psutil.Popen:
    """Starts `mobizo-agent run` in a session of its own."""
    command = [sys.executable, "-m", "device_agent", "run", "--json", "--data", f"{DATASET}={dataset}", *options]
    environment = os.environ | environment | {HOME_VARIABLE: str(home.path)}
    with log.open("ab") as output:
        return psutil.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
