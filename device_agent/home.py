"""The agent's home directory: identity, cache, runs and status.

config.json   server, device id, token, and the server's public key, pinned when this device enrolled (0600)
device.key    the device's own Ed25519 key (0600)
rules.toml    the owner's rules for training (device_agent.policy.evaluator)
cache/        program files by sha256
runs/         one directory per job
data/         data sets that the owner added (device_agent.datasets.store)
adapters/     adapters stored for use on this device (device_agent.inference.adapter_store)
seen.json     the highest verified version of each recipe's program
budget.json   minutes trained on each day
tasks.json    the owner's decisions about tasks (device_agent.policy.task_approvals)
privacy.json  privacy spent on each data set (device_agent.policy.privacy_ledger)
measurements/ what runs measured without having trained (device_agent.training.start_measurements)
trained/      what this device trained to make each adapter file (device_agent.jobs.rehearsal)
rounds.jsonl  federated rounds that this device took part in (device_agent.jobs.rounds)
peers.json    other devices' keys, trusted on first use in masked rounds (device_agent.secure_aggregation)
status.json   state of the daemon and outcome of its last job
logs/         the log (device_agent.daemon.reporting)
serve.token   bearer token of `mobizo-agent serve` (0600)
paused        present while training is paused
lock          locked by the running daemon, whose process id it contains
"""

from __future__ import annotations

import fcntl
import hmac
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field

from device_agent.durable import locked, read_document, write_document
from device_agent.errors import AlreadyRunning, NotEnrolled
from shared.durable import write_durably
from shared.errors import BadRequest, MobizoError
from shared.job import Progress, RoundRef
from shared.signing import key_id, new_private_key, parse_public, private_bytes
from shared.strict_model import StrictModel

if TYPE_CHECKING:
    from device_agent.training.run_directory import RunDirectory

HOME_VARIABLE = "MOBIZO_AGENT_HOME"
PAUSED = "paused by the user; continue with `mobizo-agent resume`"


class DeviceConfig(StrictModel):
    """Data that this device received when it enrolled."""

    server: str = Field(description="base URL")
    name: str
    device_id: str
    token: str
    public_key: str = Field(description="the server's Ed25519 key, base64, which signs programs")
    key_id: str
    former_keys: tuple[str, ...] = Field((), description="former keys of the server, base64, latest last")

    def trusted_keys(self) -> tuple[Ed25519PublicKey, ...]:
        """Returns the keys that may have signed a stored program: the server's current key, then its former keys,
        latest first.
        """
        return tuple(parse_public(text) for text in (self.public_key, *reversed(self.former_keys)))


class DaemonStatus(BaseModel):
    """State of the daemon, and outcome of its last job."""

    model_config = ConfigDict(frozen=True)

    state: str = "idle"
    job_id: str | None = None
    adapter: str | None = None
    round: RoundRef | None = Field(None, description="federated round that the current job belongs to")
    progress: Progress | None = None
    why: str | None = Field(None, description="why no job is requested")
    unknown: tuple[str, ...] = Field((), description="rules without a sensor on this device; they are not enforced")
    last_job_id: str | None = None
    last_outcome: str | None = None
    last_detail: str | None = None


class AgentHome:
    """The agent's home directory."""

    def __init__(self, path: Path) -> None:
        """path: see the module's docstring for its files."""
        self.path = path
        self.cache, self.runs, self.data = path / "cache", path / "runs", path / "data"
        self.rules, self.tasks, self.privacy = path / "rules.toml", path / "tasks.json", path / "privacy.json"
        self.program_versions, self.budget = path / "seen.json", path / "budget.json"
        self.trained, self.measurements, self.paused = path / "trained", path / "measurements", path / "paused"
        self.rounds, self.peers, self.serve_token = path / "rounds.jsonl", path / "peers.json", path / "serve.token"

    @classmethod
    def locate(cls, path: Path | None = None) -> AgentHome:
        """Returns the home at `path`, else at $MOBIZO_AGENT_HOME, else in the platform's data directory."""
        variable = os.environ.get(HOME_VARIABLE)
        return cls(path or (Path(variable) if variable else Path(platformdirs.user_data_dir("mobizo-agent"))))

    def create(self) -> None:
        """Creates the directories. Raises BadRequest if that fails."""
        try:
            for path in (self.path, self.cache, self.runs):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadRequest(
                f"{self.path} cannot be the agent's home ({error}); choose another directory with --home"
            ) from error

    def run(self, job_id: str) -> RunDirectory:
        """Returns the run directory of a job. Raises BadRequest if the id is not a plain file name."""
        from device_agent.training.run_directory import (
            RunDirectory,  # slow to import, and `predict` and `chat` do without
        )

        if not job_id or job_id != Path(job_id).name or job_id.startswith("."):
            raise BadRequest(f"the server sent a job id that is not a plain name: {job_id!r}")
        return RunDirectory(self.runs / job_id)

    def config(self) -> DeviceConfig:
        """Returns the enrollment. Raises NotEnrolled, or BadRequest if the file is damaged."""
        path = self.path / "config.json"
        config = read_document(path, DeviceConfig, BadRequest(f"{path} cannot be read; enroll this device again"))
        if config is None:
            raise NotEnrolled
        return config

    def enroll(self, config: DeviceConfig) -> None:
        """Writes the enrollment, readable by this user only, and resets rollback protection for the new server."""
        write_document(self.path / "config.json", config)
        self.program_versions.unlink(missing_ok=True)

    def pin(self, former: str, path: Sequence[str]) -> DeviceConfig:
        """Pins the last key of a rotation chain (base64) in one atomic write and returns the new configuration.

        former: the key that the chain starts from; if another key is pinned by now, this device was enrolled again and
        nothing changes. Rollback protection is kept.
        """
        config = self.config()
        if config.public_key != former:
            return config
        pinned = config.model_copy(
            update={
                "public_key": path[-1],
                "key_id": key_id(parse_public(path[-1])),
                "former_keys": (*config.former_keys, config.public_key, *path[:-1]),
            }
        )
        write_document(self.path / "config.json", pinned)
        return pinned

    def device_key(self) -> Ed25519PrivateKey:
        """Returns the device's private key, creating it on first use. Raises BadRequest for a damaged file."""
        path = self.path / "device.key"
        try:
            return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
        except FileNotFoundError:
            key = new_private_key()
            write_durably(path, private_bytes(key))
            return key
        except (OSError, ValueError) as error:
            raise BadRequest(f"{path} cannot be read ({error}); remove it and enroll this device again") from error

    def noise_key(self) -> str:
        """Returns the key of the noise on counts of records, 64 hexadecimal digits. It stays on this device."""
        secret = private_bytes(self.device_key())
        return hmac.digest(secret, b"mobizo noise on counts of records", "sha256").hex()

    def status(self) -> DaemonStatus | None:
        """Returns the last written status, or None."""
        return read_document(self.path / "status.json", DaemonStatus)

    def running(self) -> bool:
        """Returns whether a daemon runs in this home."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the home's exclusive lock, which the kernel releases when this process ends. Raises AlreadyRunning."""
        with locked(self.path / "lock", AlreadyRunning()) as descriptor:
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            yield

    def stop_daemon(self) -> None:
        """Sends SIGTERM to the daemon of this home. Raises MobizoError if none runs or its process is unknown."""
        if not self.running():
            raise MobizoError("no agent runs in this home; start one with `mobizo-agent run`")
        import psutil  # here, because `predict` and `chat` do without

        lock = self.path / "lock"
        try:
            process = psutil.Process(int(lock.read_text()))
            # After a crash, the number may belong to another program until the next daemon has written its own.
            if str(lock.resolve()) not in {file.path for file in process.open_files()}:
                raise ProcessLookupError
            process.terminate()
        except (OSError, ValueError, psutil.Error) as error:
            raise MobizoError(
                "the agent runs, but its process cannot be found from here, because it is starting or runs in another "
                "container; try again, or send SIGTERM to it there"
            ) from error
