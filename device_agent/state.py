"""The agent's home: where its identity, cache, runs and status lie.

    config.json   server, device id, token, and the server's public key, pinned when this device enrolled (0600)
    device.key    the device's own Ed25519 key (0600)
    rules.toml    when its owner lets it train (device_agent.rules_file)
    cache/        program files by sha256
    runs/         one directory per job
    adapters/     what it keeps for its own use (device_agent.adapters)
    seen.json     the highest version of each recipe's program it has seen
    budget.json   minutes trained on each day
    rounds.jsonl  the rounds of cohorts that it took part in (device_agent.rounds)
    peers.json    other devices' keys, as first seen in masked rounds (device_agent.peers)
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.durable import write_durably
from device_agent.errors import AlreadyRunning, NotEnrolled
from device_agent.journal import RunDirectory
from shared.errors import BadRequest
from shared.job import Progress, RoundRef
from shared.signing import key_id, new_private_key, parse_public, private_bytes

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
    former_keys: tuple[str, ...] = Field((), description="those that handed over to it, base64; the latest last")

    def trusted_keys(self) -> tuple[Ed25519PublicKey, ...]:
        """What a program kept here may be signed with: the server's key, and those pinned here before it."""
        return tuple(parse_public(text) for text in (self.public_key, *reversed(self.former_keys)))


class Status(BaseModel):
    """What the daemon does right now, and how its last job ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int = Field(default_factory=os.getpid)
    state: str = "idle"
    job_id: str | None = None
    adapter: str | None = None
    round: RoundRef | None = Field(None, description="of a cohort, that the job in hand belongs to")
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
    def rounds(self) -> Path:
        """Past rounds."""
        return self.path / "rounds.jsonl"

    @property
    def peers(self) -> Path:
        """Other devices' keys."""
        return self.path / "peers.json"

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

    def pin(self, former: str, path: Sequence[str]) -> DeviceConfig:
        """Trusts the last of the keys (base64) to which the pinned one handed over, in one write.

        former: the pinned one; if it is another by now, this device was enrolled again and nothing changes. What was
        seen stays seen: an old program is refused as before.
        """
        config = self.config()
        if config.public_key != former:
            return config
        following = config.model_copy(
            update={
                "public_key": path[-1],
                "key_id": key_id(parse_public(path[-1])),
                "former_keys": (*config.former_keys, config.public_key, *path[:-1]),
            }
        )
        write_durably(self.path / "config.json", following.model_dump_json(indent=1).encode())
        return following

    def device_key(self) -> Ed25519PrivateKey:
        """The device's own key, made on first use. Raises BadRequest for a damaged file."""
        key = self.kept_key()
        if key is None:
            key = new_private_key()
            self.keep_key(key)
        return key

    def kept_key(self) -> Ed25519PrivateKey | None:
        """The device's own key, if it has one. Raises BadRequest for a damaged file."""
        path = self.path / "device.key"
        try:
            return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BadRequest(f"{path} cannot be read ({error}); remove it and enrol this device again") from error

    def keep_key(self, key: Ed25519PrivateKey) -> None:
        """Makes a key this device's own; the server knows it by enrolment."""
        write_durably(self.path / "device.key", private_bytes(key))

    def remove_empty(self) -> None:
        """Takes back what `create` made, as far as nothing lies in it."""
        for path in (self.cache, self.runs, self.path):
            with suppress(OSError):
                path.rmdir()

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
