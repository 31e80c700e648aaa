"""The agent's home: where its identity, cache, runs and status lie.

    config.json   server, device id, token, and the server's public key, pinned when this device enrolled (0600)
    device.key    the device's own Ed25519 key (0600)
    rules.toml    when its owner lets it train (device_agent.rules_file)
    cache/        program files by sha256
    runs/         one directory per job
    adapters/     what it keeps for its own use (device_agent.adapters)
    seen.json     the highest version of each recipe's program it has seen
    budget.json   minutes trained on each day
    status.json   what the daemon is doing
    logs/         its log (device_agent.logs)
    control.sock  where the running daemon answers (device_agent.control)
    paused        there while a person wants no training
    lock          held by the running daemon

Knows no HTTP.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.durable import write_durably
from device_agent.errors import AlreadyRunning, NotEnrolled
from device_agent.journal import RunDirectory
from shared.errors import BadRequest
from shared.job import Progress
from shared.signing import new_private_key, private_bytes

HOME_VARIABLE = "MOBIZO_AGENT_HOME"


class DeviceConfig(BaseModel):
    """What enrolment gave this device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: str = Field(description="base URL")
    name: str
    device_id: str
    token: str
    public_key: str = Field(description="the server's, base64: what programs must be signed with")
    key_id: str


class Status(BaseModel):
    """What the daemon does right now, and how its last job ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int = Field(default_factory=os.getpid)
    state: str = "idle"
    job_id: str | None = None
    adapter: str | None = None
    progress: Progress | None = None
    why: str | None = Field(None, description="why no job is asked for, in words")
    unknown: tuple[str, ...] = Field((), description="rules that no sensor of this device can answer; not held")
    clock_skew_seconds: float | None = Field(None, description="this clock ahead of the server's, if it is off")
    last_job_id: str | None = None
    last_outcome: str | None = None
    last_detail: str | None = None
    updated_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Home:
    """One agent's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def locate(cls, given: Path | None = None) -> Home:
        """`given`, else $MOBIZO_AGENT_HOME, else the platform's place for application data."""
        variable = os.environ.get(HOME_VARIABLE)
        return cls(given or (Path(variable) if variable else Path(platformdirs.user_data_dir("mobizo-agent"))))

    def create(self) -> None:
        """Makes the directories. Raises BadRequest if they cannot be made."""
        try:
            for path in (self.path, self.cache, self.runs):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadRequest(f"{self.path} cannot be this agent's home ({error}); give another with --home") from error

    @property
    def cache(self) -> Path:
        """Program files."""
        return self.path / "cache"

    @property
    def runs(self) -> Path:
        """Run directories."""
        return self.path / "runs"

    @property
    def rules(self) -> Path:
        """The owner's rules."""
        return self.path / "rules.toml"

    @property
    def seen(self) -> Path:
        """Versions of programs."""
        return self.path / "seen.json"

    @property
    def budget(self) -> Path:
        """Minutes trained."""
        return self.path / "budget.json"

    @property
    def control(self) -> Path:
        """The running daemon's socket."""
        return self.path / "control.sock"

    def run(self, job_id: str) -> RunDirectory:
        """The run directory of one job. Raises BadRequest for an id that is no plain name."""
        if not job_id or job_id != Path(job_id).name or job_id.startswith("."):
            raise BadRequest(f"the server sent a job id that is no plain name: {job_id!r}")
        return RunDirectory(self.runs / job_id)

    def config(self) -> DeviceConfig:
        """What enrolment gave. Raises NotEnrolled, or BadRequest for a damaged file."""
        path = self.path / "config.json"
        try:
            return DeviceConfig.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise NotEnrolled from error
        except (OSError, ValidationError) as error:
            raise BadRequest(f"{path} cannot be read; enrol this device again") from error

    def enrol(self, config: DeviceConfig) -> None:
        """Keeps what enrolment gave, readable by this user alone. The server is trusted anew: no program is too old."""
        write_durably(self.path / "config.json", config.model_dump_json(indent=1).encode())
        self.seen.unlink(missing_ok=True)

    def device_key(self) -> Ed25519PrivateKey:
        """The device's own key, made on first use."""
        path = self.path / "device.key"
        if path.exists():
            return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
        key = new_private_key()
        write_durably(path, private_bytes(key))
        return key

    def write_status(self, status: Status) -> None:
        """Shows what the daemon does; whole for any reader, but not synced: a power cut makes it untrue anyway."""
        aside = self.path / "status.json.new"
        aside.write_text(status.model_dump_json(indent=1))
        aside.replace(self.path / "status.json")

    def status(self) -> Status | None:
        """What the daemon showed last; None before its first start."""
        try:
            return Status.model_validate_json((self.path / "status.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def running(self) -> bool:
        """Whether a daemon works in this home."""
        try:
            with self.lock():
                return False
        except AlreadyRunning:
            return True
        except FileNotFoundError:
            return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second daemon out; the kernel lets go when this process ends. Raises AlreadyRunning."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AlreadyRunning from error
        try:
            yield
        finally:
            os.close(descriptor)
