"""The server's settings, read from `MOBIZO_*` environment variables."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import Field, SecretStr, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.errors import BadRequest

MEBIBYTE = 1 << 20


class Delivery(StrEnum):
    """How the server sends the bytes of a file to a client that may have it."""

    STREAM = "stream"  # through this server
    ACCEL = "accel"  # by the nginx in front of it, which reads the same directory
    REDIRECT = "redirect"  # large ones from the bucket, by a signed address


@dataclass(frozen=True)
class Tuning:
    """How a process connects to its database; times in seconds.

    recycle_seconds: a connection older than this is replaced by a new one when it is next asked for. connect_seconds:
    for a connection, also if all are in use. statement_seconds: for one statement. lock_seconds: for somebody else's
    lock. On SQLite only lock_seconds counts.
    """

    connections: int = 20
    overflow: int = 40
    recycle_seconds: float = 1800
    connect_seconds: float = 5
    statement_seconds: float = 30
    lock_seconds: float = 10


class _Files(PydanticBaseSettingsSource):
    """`MOBIZO_NAME_FILE=PATH`: the setting NAME is what that file holds, as containers are given secrets."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The file's text without the line's end; None if no file is named."""
        variable = f"MOBIZO_{field_name}_FILE".upper()
        if (path := os.environ.get(variable)) is None:
            return None, field_name, False
        try:
            return Path(path).read_text(encoding="utf-8").rstrip("\r\n"), field_name, False
        except (OSError, ValueError) as error:
            raise BadRequest(f"{variable}: {path} cannot be read as text") from error

    def __call__(self) -> dict[str, Any]:
        """Returns all settings that come from files."""
        values = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in values.items() if value is not None}


class Settings(BaseSettings):
    """One deployment's settings; sizes in bytes, times in seconds. `MOBIZO_NAME_FILE` names a file that holds one."""

    model_config = SettingsConfigDict(env_prefix="MOBIZO_", frozen=True)

    home: Path = Field(
        default_factory=lambda: Path.home() / ".local/share/mobizo-server",
        description="directory of the database, the files and the signing key",
    )
    database_url: str | None = Field(None, description="SQLAlchemy URL; null: SQLite in home")
    database_password: SecretStr | None = Field(None, description="put into that URL")
    # How the database is talked to, by each process; on SQLite only the last counts
    database_connections: int = Field(20, ge=1, description="that are kept")
    database_overflow: int = Field(40, ge=0, description="more connections while they are needed")
    database_connect_seconds: float = Field(5, gt=0, description="most time to get a connection")
    database_statement_seconds: float = Field(30, gt=0, description="most time of one statement")
    database_lock_seconds: float = Field(10, gt=0, description="most time to wait for another transaction")
    event_days: float = Field(
        14, ge=0, description="how long a job that ended keeps its progress events; 0: they are never removed"
    )
    # Files
    storage_url: str | None = Field(None, description="s3://BUCKET/PREFIX; null: a directory in home")
    storage_endpoint: str | None = Field(None, description="URL of an S3-compatible service; null: AWS's")
    storage_public_endpoint: str | None = Field(None, description="the same, as devices reach it; null: no other")
    storage_region: str = Field("us-east-1", description="of the bucket")
    storage_access_key_id: SecretStr | None = Field(None, description="null: AWS's own variables and services")
    storage_secret_access_key: SecretStr | None = Field(None, description="of that key id")
    storage_allow_http: bool = Field(False, description="reach the service in clear beyond this machine")
    delivery: Delivery = Field(Delivery.STREAM, description="stream, accel (by nginx) or redirect (to the bucket)")
    accel_prefix: str = Field("/mobizo-files/", pattern=r"^/([A-Za-z0-9._-]+/)+$", description="nginx's location")
    redirect_bytes: int = Field(8 * MEBIBYTE, ge=0, description="smaller files are streamed also by `redirect`")
    collect_hours: float = Field(24, ge=0, description="between two collections of unnamed files; 0: none by itself")
    collect_grace_hours: float = Field(24, ge=0, description="how long a file may be unnamed before it is removed")
    # Adapters
    adapter_grace_days: float = Field(
        30, ge=0, le=36_500, description="how long a deleted adapter or version can be taken back before it is removed"
    )
    # Operation
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="to listen on; 0: a free one")
    forwarded_allow_ips: str = Field(
        "",
        description="addresses or networks of the proxies that are believed whose request they pass on; commas between",
    )
    grace_seconds: int = Field(10, ge=1, description="what requests under way are given to end when the server stops")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="tells metrics to this machine without a token; 0: a free port",
    )
    disk_floor_bytes: int = Field(
        512 * MEBIBYTE, ge=0, description="free disk space under which the server is not ready"
    )
    migrate_at_start: bool | None = Field(
        None, description="bring the database's schema up to date at every start; null: SQLite only"
    )
    # Connections of each server process
    connections: int = Field(4096, ge=16, description="open at once; fewer if the limit of open files is lower")
    address_connections: int = Field(
        1024, ge=1, description="the same, of one address; proxies in FORWARDED_ALLOW_IPS have no such limit"
    )
    # Requests
    max_body_bytes: int = Field(4 * MEBIBYTE, ge=1024, description="of a JSON request")
    upload_bytes: int = Field(256 * MEBIBYTE, ge=1024, description="of a file that a device uploads")
    body_seconds: float = Field(
        30, gt=0, description="how long a body may take to arrive, beside a second for each 4 KiB of it"
    )
    idempotency_seconds: float = Field(24 * 3600, gt=0, description="how long answers are kept for an Idempotency-Key")
    poll_seconds: float = Field(0.5, gt=0, description="how often waiting requests and workers look again")
    # Tokens
    token_days: int = Field(
        90, ge=1, le=3650, description="how long a person's or service's token lasts unless it is said"
    )
    # Requests a second in the long run, and how many at once after a pause; each server process counts for itself
    token_rate: float = Field(100, gt=0, description="requests a second of one token")
    token_burst: int = Field(1000, ge=1, description="the same, at once after a pause")
    address_rate: float = Field(20, gt=0, description="requests a second of one address without a token")
    address_burst: int = Field(200, ge=1, description="the same, at once after a pause")
    refusal_rate: float = Field(0.5, gt=0, description="refused requests a second of one address")
    refusal_burst: int = Field(30, ge=1, description="the same, at once after a pause")
    # Devices: how they join, and the signatures under what they send
    public_url: str | None = Field(None, description="where people reach this server; null: as the request says")
    device_request_interval_seconds: int = Field(5, ge=1, description="least time between its questions")
    signed_requests: Literal["none", "results", "all"] = Field(
        "results", description="what devices must sign: nothing, uploads and completions, or all that changes things"
    )
    upload_rms_limit: float = Field(
        100, gt=0, description="root mean square of an uploaded adapter's elements above which it is refused"
    )
    # Trajectories that devices send
    trajectory_bytes: int = Field(64 * MEBIBYTE, ge=1024, description="the largest that is taken")
    replay_updates: int = Field(
        30_000_000_000,
        ge=0,
        description="steps times queries times elements up to which one is replayed; a longer one stays unverified",
    )
    trajectory_instead: bool = Field(
        True, description="keep a verified trajectory in place of its LoRA-B file where it is smaller"
    )
    # Leases of jobs
    lease_seconds: float = Field(120, gt=0, description="how long a job is a device's without a heartbeat")
    lease_attempts: int = Field(5, ge=1, description="leases of one job that may run out before it fails")
    # Compilation
    compile_lease_seconds: float = Field(30, gt=0, description="how long a program is a worker's without a heartbeat")
    compile_attempts: int = Field(3, ge=1, description="tries of a compile that crashes")
    compile_backoff_seconds: float = Field(
        5, ge=0, description="wait after a compile's first crash; it doubles with each"
    )
    compile_memory_bytes: int | None = Field(None, ge=1, description="resident memory at which a compile is stopped")
    compile_budget_bytes: int | None = Field(
        None, ge=1, description="memory that a machine's compiles may take together; null: 80 % of the machine's"
    )
    worker_host: str | None = Field(
        None, max_length=255, description="name of the machine whose memory its workers share; null: the host's name"
    )
    engine: Literal["embedded", "procrastinate"] = Field(
        "embedded", description="how workers learn of programs: they look, or PostgreSQL tells them"
    )
    compiler_command: list[str] = Field(
        default_factory=lambda: [sys.executable, "-m", "server.compiler"],
        description="takes recipe file, base source, output directory; see server/programs/compiler_process.py",
    )
    converter_command: list[str] = Field(
        default_factory=lambda: [sys.executable, "-m", "server.registry.exports"],
        description="takes order, raw B, base source, output directory (server/registry/exports/converter_process.py)",
    )
    # Scoring: a process beside the server that holds base models and adapters
    scorer: Literal["lazy", "eager", "off"] = Field(
        "lazy", description="when the process that scores and generates starts: when it is first asked, at once, never"
    )
    scorer_base_bytes: int = Field(
        2048 * MEBIBYTE, ge=1, description="base models that it keeps, float32; the one used longest ago goes first"
    )
    scorer_adapter_bytes: int = Field(
        512 * MEBIBYTE, ge=1, description="adapters that it keeps, with their A; the one used longest ago goes first"
    )
    scorer_cache_bytes: int = Field(
        512 * MEBIBYTE, ge=1, description="keys and values of the texts that it generates at once"
    )
    scorer_batch_tokens: int = Field(2048, ge=1, description="tokens, padding included, that one of its batches holds")
    scorer_request_tokens: int = Field(131_072, ge=1, description="of one request to score")
    scorer_queue_tokens: int = Field(524_288, ge=1, description="that wait in all; one tenant has at most half of them")
    scorer_seconds: float = Field(120, gt=0, description="how long a request may wait for its answer")
    scorer_threads: int | None = Field(None, ge=1, description="that it computes with; null: one for each core")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then files that it names."""
        return init_settings, env_settings, _Files(settings_cls)

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _addresses(cls, text: str) -> str:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        for part in parts:
            if part != "*":
                ip_network(part, strict=False)
        return ",".join(parts)

    @property
    def url(self) -> str:
        """The database to use, with its password. Raises BadRequest if there is no user to whom that belongs."""
        if self.database_url is None:
            return f"sqlite:///{self.home / 'mobizo.sqlite3'}"
        if self.database_password is None:
            return self.database_url
        scheme, _, rest = self.database_url.partition("://")
        user, at, place = rest.rpartition("@")
        if not at:
            raise BadRequest("MOBIZO_DATABASE_PASSWORD needs a user in MOBIZO_DATABASE_URL: scheme://USER@HOST/NAME")
        name = user.partition(":")[0]
        return f"{scheme}://{name}:{quote(self.database_password.get_secret_value(), safe='')}@{place}"

    @property
    def tuning(self) -> Tuning:
        """Returns the tuning of the database connection."""
        return Tuning(
            connections=self.database_connections,
            overflow=self.database_overflow,
            connect_seconds=self.database_connect_seconds,
            statement_seconds=self.database_statement_seconds,
            lock_seconds=self.database_lock_seconds,
        )

    @property
    def adapter_grace(self) -> timedelta:
        """How long a deletion in the registry can be undone."""
        return timedelta(days=self.adapter_grace_days)

    @property
    def artifacts_path(self) -> Path:
        """Returns the location of stored files."""
        return self.home / "artifacts"

    @property
    def key_path(self) -> Path:
        """The Ed25519 key that signs manifests."""
        return self.home / "keys" / "manifest.ed25519"

    def environment(self) -> dict[str, str]:
        """These settings as environment variables, for a child process."""
        fields = self.model_dump(mode="json", exclude_none=True)
        for name, value in self:
            if isinstance(value, SecretStr):
                fields[name] = value.get_secret_value()
        return {
            f"MOBIZO_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in fields.items()
        }
