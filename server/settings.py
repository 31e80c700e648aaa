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
from shared.protocol import ReferenceTexts

MEBIBYTE = 1 << 20
PREFIX = "MOBIZO_"  # of the environment's variables


class Delivery(StrEnum):
    """How the server sends the bytes of a file to a client that may have it."""

    STREAM = "stream"  # through this server
    ACCEL = "accel"  # by the nginx in front of it, which reads the same directory
    REDIRECT = "redirect"  # large ones from the bucket, by a signed address


@dataclass(frozen=True)
class Tuning:
    """How a process connects to its database; times in seconds.

    connections: kept open. overflow: opened beside them while they are needed. recycle_seconds: a connection older than
    this is replaced when it is used next. connect_seconds: maximum wait for a connection, also if all are in use.
    statement_seconds: maximum time of one statement. lock_seconds: maximum wait for a lock of another transaction. On
    SQLite only lock_seconds applies.
    """

    connections: int = 20
    overflow: int = 40
    recycle_seconds: float = 1800
    connect_seconds: float = 5
    statement_seconds: float = 30
    lock_seconds: float = 10


class _Files(PydanticBaseSettingsSource):
    """Reads settings from files: `MOBIZO_NAME_FILE=PATH` sets NAME to the content of a file, such as a secret."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Returns the content of the file without its last line break, or its JSON; None if no file is named."""
        variable = f"{PREFIX}{field_name}_FILE".upper()
        if (path := os.environ.get(variable)) is None:
            return None, field_name, False
        try:
            text = Path(path).read_text(encoding="utf-8-sig").rstrip("\r\n")
            return self.prepare_field_value(field_name, field, text, False), field_name, False
        except (OSError, ValueError) as error:
            raise BadRequest(f"{variable}: {path} cannot be read as text, or as JSON of a list or an object") from error

    def __call__(self) -> dict[str, Any]:
        """Returns all settings that come from files."""
        values = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in values.items() if value is not None}


class Settings(BaseSettings):
    """One deployment's settings; sizes in bytes, times in seconds. `MOBIZO_NAME_FILE` names a file that holds one."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    home: Path = Field(
        default_factory=lambda: Path.home() / ".local/share/mobizo-server",
        description="The directory of the database, the files and the signing key.",
    )
    # Database
    database_url: str | None = Field(None, description="The SQLAlchemy URL. Null selects SQLite in home.")
    database_password: SecretStr | None = Field(None, description="The password that is inserted into the URL.")
    database_connections: int = Field(20, ge=1, description="The connections kept open per process.")
    migrate_at_start: bool | None = Field(
        None, description="Whether every start upgrades the database schema. Null upgrades SQLite only."
    )
    event_days: float = Field(
        14,
        ge=0,
        description="The days for which leases and progress events of an ended job are kept. 0 keeps them forever.",
    )
    # Files
    storage_url: str | None = Field(
        None, description="The bucket as s3://BUCKET/PREFIX. Null selects a directory in home."
    )
    storage_endpoint: str | None = Field(None, description="The URL of an S3-compatible service. Null selects AWS.")
    storage_public_endpoint: str | None = Field(
        None, description="The URL by which devices reach that service, if it differs."
    )
    storage_access_key_id: SecretStr | None = Field(
        None, description="The access key id. Null selects the standard AWS variables."
    )
    storage_secret_access_key: SecretStr | None = Field(None, description="The secret of that access key.")
    storage_allow_http: bool = Field(
        False, description="Whether the service may be reached without TLS beyond this machine."
    )
    delivery: Delivery = Field(
        Delivery.STREAM,
        description="How files are sent: `stream` by this server, `accel` by nginx, `redirect` to the bucket.",
    )
    upload_bytes: int = Field(256 * MEBIBYTE, ge=1024, description="The maximum bytes of a file that a device uploads.")
    collect_hours: float = Field(24, ge=0, description="The hours between garbage collections. 0 disables them.")
    collect_grace_hours: float = Field(
        24, ge=0, description="The hours for which garbage collection keeps a file after its last reference is removed."
    )
    adapter_grace_days: float = Field(
        30, ge=0, le=36_500, description="The days for which a deleted adapter or version can be restored."
    )
    # Network
    host: str = Field("127.0.0.1", description="The address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="The port to listen on. 0 selects a free port.")
    forwarded_allow_ips: str = Field(
        "",
        description="The addresses or networks, separated by commas, of proxies whose forwarding headers are trusted.",
    )
    grace_seconds: int = Field(
        10, ge=1, description="The seconds that requests in progress may take to end when the server stops."
    )
    connections: int = Field(
        4096, ge=16, description="The maximum connections open at once per process; a quarter of them per address."
    )
    webhook_networks: str = Field(
        "",
        description="The private networks, separated by commas, that webhooks may reach, also by http; others are "
        "refused.",
    )
    # Requests
    token_rate: float = Field(
        100, gt=0, description="The requests per second of one token, and ten times as many at once after a pause."
    )
    address_rate: float = Field(
        20, gt=0, description="The requests per second of one address without a token, and ten times as many at once."
    )
    signed_requests: Literal["none", "results", "all"] = Field(
        "results",
        description="What devices must sign: `none`, `results` (uploads and completions), or `all` changes.",
    )
    poll_seconds: float = Field(
        0.5, gt=0, description="The seconds between two checks of waiting requests and workers for new work."
    )
    lease_seconds: float = Field(
        120, gt=0, description="The seconds for which a device keeps a job without a heartbeat."
    )
    reference_texts: dict[str, ReferenceTexts] = Field(
        {},
        description="The reference texts of base models that need others than the agent's own English ones, as a JSON "
        "object of lists by the base's name.",
    )
    # Compilation
    compile_lease_seconds: float = Field(
        30, gt=0, description="The seconds for which a worker keeps a task without a heartbeat."
    )
    compile_attempts: int = Field(3, ge=1, description="The maximum attempts at a task whose process crashes.")
    compile_budget_bytes: int | None = Field(
        None,
        ge=1,
        description="The memory that all compilations of a machine may take together; one that takes more is stopped. "
        "Null selects 80 % of the machine's memory.",
    )
    compiler_command: list[str] = Field(
        default_factory=lambda: [sys.executable, "-m", "server.compiler"],
        description="The command that compiles a recipe, as a JSON list; it gets recipe, base and output directory.",
    )
    # Scoring: a process beside the server that holds base models and adapters
    scorer: Literal["lazy", "eager", "off"] = Field(
        "lazy",
        description="When the scoring process starts: `lazy` at the first request, `eager` at once, `off` never.",
    )
    scorer_memory_bytes: int = Field(
        4096 * MEBIBYTE,
        ge=1,
        description="The maximum memory of the scoring process: half for base models, an eighth for adapters, an "
        "eighth for keys and values of generated texts.",
    )

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

    @field_validator("forwarded_allow_ips", "webhook_networks")
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
        return Tuning(connections=self.database_connections)

    @property
    def adapter_grace(self) -> timedelta:
        """How long a deletion in the registry can be undone."""
        return timedelta(days=self.adapter_grace_days)

    @property
    def artifacts_path(self) -> Path:
        """Returns the location of stored files."""
        return self.home / "artifacts"

    @property
    def lowered_path(self) -> Path:
        """Layers that this machine's compilations lowered, which later ones use. It may be removed at any time."""
        return self.home / "lowered"

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
