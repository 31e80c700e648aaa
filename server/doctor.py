"""What is wrong on this server, and what to do about it: one check, one line. Leaves nothing behind.

Knows no request; loads the compiler only in a process of its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package ships no types
from cryptography import x509
from sqlalchemy import Connection, func, select, text

from server.artifacts.opening import open_artifacts
from server.clock import utc_now
from server.db.database import Database
from server.db.revisions import lacking, reached
from server.devices.models import Device
from server.keys import load_key
from server.programs.models import Worker
from server.safety import Tls, dangers
from server.settings import Settings
from shared.checkup import Check
from shared.errors import MobizoError
from shared.signing import key_id

OLDEST_POSTGRESQL = 14
SKEW = timedelta(seconds=10)  # between hosts; leases and heartbeats are counted in tens of seconds
LITTLE_DISK, LITTLE_MEMORY = 10 * 10**9, 4 * 10**9  # bytes; a small model's programs and its compile fit above
EXPIRES_SOON = timedelta(days=14)
IMPORT_SECONDS = 300
BUILT = datetime(2026, 1, 1, tzinfo=UTC)  # no clock that is right is before
_COMPILER = "import server.compiler.program, server.compiler.backends"


def examine(
    settings: Settings, certificate: Path | None = None, key: Path | None = None, quick: bool = False
) -> Iterator[Check]:
    """Every check, as it is made. certificate, key: of the TLS that this server itself will speak.

    quick: does not load the compiler.
    """
    yield check_home(settings)
    yield check_key(settings)
    yield from check_database(settings)
    yield check_files(settings)
    yield check_disk(settings)
    yield check_memory(settings)
    if not quick:
        yield check_compiler()
    yield from check_dangers(settings, Tls(certificate, key) if certificate and key else None)
    if certificate is not None and key is not None:
        yield check_tls(certificate, key, utc_now())


def check_home(settings: Settings) -> Check:
    """The home is there, and for this user alone."""
    home = settings.home
    if not home.is_dir():
        return Check("home", "fail", f"{home} is not there", "`mobizo-server init` makes it")
    stat = home.stat()
    if stat.st_uid != os.geteuid():
        return Check("home", "fail", f"{home} is another user's", f"run as that user, or `chown` {home}")
    if not os.access(home, os.W_OK | os.X_OK):
        return Check("home", "fail", f"{home} cannot be written", f"`chmod 700 {home}`")
    if stat.st_mode & 0o077:
        return Check("home", "fail", f"others may look into {home}", f"`chmod 700 {home}`")
    return Check("home", "ok", f"{home}, for this user alone")


def check_key(settings: Settings) -> Check:
    """The signing key can be read, and by nobody else."""
    try:
        key = load_key(settings.key_path)
    except MobizoError as error:
        return Check("key", "fail", error.detail)
    return Check("key", "ok", f"programs are signed by {key_id(key.public_key())}")


def check_database(settings: Settings) -> Iterator[Check]:
    """It can be reached, is new enough, has every migration, and agrees about the time."""
    if settings.database_url is None and not settings.home.is_dir():
        yield Check("database", "fail", "there is none without a home", "`mobizo-server init` makes it")
        return
    database = Database(settings.url, settings.tuning)
    try:
        with reached(database.engine) as connection:
            yield _version(connection)
            missing = lacking(connection)
            if missing:
                told = f"{len(missing)} of this release are not applied"
                yield Check("schema", "fail", told, "`mobizo-server migrate`")
            else:
                yield Check("schema", "ok", "every migration of this release is applied")
                yield _clock(connection, utc_now())
    except MobizoError as error:
        yield Check("database", "fail", error.detail)
    finally:
        database.close()


def _version(connection: Connection) -> Check:
    version = ".".join(str(part) for part in connection.dialect.server_version_info or ())
    if connection.dialect.name == "sqlite":
        mode = connection.scalar(text("PRAGMA journal_mode"))
        if mode != "wal":
            return Check("database", "fail", f"SQLite keeps a {mode} journal", "put the home on a local disk")
        return Check("database", "ok", f"SQLite {version}, write-ahead log")
    if int((connection.dialect.server_version_info or (0,))[0]) < OLDEST_POSTGRESQL:
        return Check("database", "fail", f"PostgreSQL {version}", f"upgrade it to {OLDEST_POSTGRESQL} or later")
    if not connection.scalar(text("SELECT pg_is_in_recovery()")):
        return Check("database", "ok", f"PostgreSQL {version}")
    return Check("database", "fail", "this PostgreSQL is a standby", "name its primary in MOBIZO_DATABASE_URL")


def _clock(connection: Connection, now: datetime) -> Check:
    remedy = "set the clocks of all hosts by NTP; leases are counted by them"
    if now < BUILT:
        return Check("clock", "fail", f"it says {now:%Y-%m-%d}", remedy)
    latest = [connection.scalar(select(func.max(column))) for column in (Worker.seen_at, Device.last_seen_at)]
    if connection.dialect.name == "postgresql":
        theirs = connection.scalar(text("SELECT clock_timestamp()"))
        if theirs is not None and abs(theirs - now) > SKEW:
            told = f"{abs(theirs - now).total_seconds():.0f} s from the database's"
            return Check("clock", "fail", told, remedy)
    ahead = [moment for moment in latest if moment is not None and moment > now + SKEW]
    if ahead:
        told = f"the database knows of {max(ahead):%Y-%m-%d %H:%M:%S} UTC, which is yet to come"
        return Check("clock", "warn", told, remedy)
    return Check("clock", "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC")


def check_files(settings: Settings) -> Check:
    """A file can be stored, read and removed."""
    try:
        artifacts = open_artifacts(settings)
        data = secrets.token_bytes(64)
        sha256 = artifacts.put(data)
        whole = artifacts.read(sha256) == data
        artifacts.delete([sha256])
    except (MobizoError, OSError) as error:
        why = error.detail if isinstance(error, MobizoError) else f"{error.strerror} ({error.filename})"
        return Check("files", "fail", why, "see MOBIZO_STORAGE_URL, and who may write there")
    if not whole:
        return Check("files", "fail", "what was stored came back changed", "check the disk or the object store")
    return Check("files", "ok", "stored, read and removed one")


def check_disk(settings: Settings) -> Check:
    """There is room for programs and uploads."""
    place = settings.home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    told = f"{free / 1e9:.1f} GB free at {place}"
    if free < settings.disk_floor_bytes:
        return Check("disk", "fail", told, "free some; below MOBIZO_DISK_FLOOR_BYTES the server is not ready")
    if free < LITTLE_DISK:
        return Check("disk", "warn", told, "a program of a large model may not fit")
    return Check("disk", "ok", told)


def check_memory(settings: Settings) -> Check:
    """There is memory to compile in."""
    spare = int(psutil.virtual_memory().available)
    told = f"{spare / 1e9:.1f} GB available"
    if spare < LITTLE_MEMORY:
        return Check("memory", "warn", told, "compiles of larger models will be killed; let workers run elsewhere")
    limit = settings.compile_memory_bytes
    if limit is not None and limit > spare:
        told += f", MOBIZO_COMPILE_MEMORY_BYTES allows a compile {limit / 1e9:.1f} GB"
        return Check("memory", "warn", told, "set it lower")
    return Check("memory", "ok", told)


def check_compiler() -> Check:
    """The compiler and ExecuTorch load."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _COMPILER],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check("compiler", "fail", f"it did not load in {IMPORT_SECONDS} s", "look at this machine's load")
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check("compiler", "fail", why, "install mobizo[server]; only workers need it")
    return Check("compiler", "ok", "ExecuTorch and the compiler load")


def check_dangers(settings: Settings, tls: Tls | None) -> Iterator[Check]:
    """Nothing that `run` would refuse without --insecure-dev."""
    found = list(dangers(settings, tls))
    for danger in found:
        yield Check("safety", "warn", danger)
    if not found:
        yield Check("safety", "ok", f"{settings.host} port {settings.port}, " + ("with TLS" if tls else "in clear"))


def check_tls(certificate: Path, key: Path, now: datetime) -> Check:
    """The certificate chain is valid now, for a while yet, and its key is the right one."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        chain = x509.load_pem_x509_certificates(certificate.read_bytes())
    except (OSError, ValueError) as error:
        return Check("tls", "fail", f"{certificate} and {key} cannot be used ({error})", "give PEM files that fit")
    begins = max(link.not_valid_before_utc for link in chain)
    ends = min(link.not_valid_after_utc for link in chain)
    if now < begins:
        return Check("tls", "fail", f"the certificate is valid from {begins:%Y-%m-%d} on", "look at the clock")
    if now > ends:
        return Check("tls", "fail", f"the certificate expired on {ends:%Y-%m-%d}", "renew it, then restart the server")
    told = f"the certificate is valid until {ends:%Y-%m-%d}"
    if ends - now < EXPIRES_SOON:
        return Check("tls", "warn", told, "renew it, then restart the server")
    if key.stat().st_mode & 0o077:
        return Check("tls", "warn", f"others may read {key}", f"`chmod 600 {key}`")
    return Check("tls", "ok", told)
