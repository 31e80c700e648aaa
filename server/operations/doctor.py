"""Diagnoses a server: runs checks that each report a state and a remedy. It leaves no files behind.

The compiler is imported in a separate process only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches

import psutil
from sqlalchemy import Connection, MetaData, func, select, text

from server.database.columns import Table, utc_now
from server.database.database import Database
from server.database.schema import lacking, missing_columns, reached
from server.identity.devices.repository import Device
from server.identity.signing_keys.service import load_key
from server.operations.health import DISK_FLOOR_BYTES
from server.settings import PREFIX, Settings
from server.storage.opening import open_artifacts
from server.tasks.repository import WorkerProcess
from shared.checkup import Check
from shared.errors import MobizoError
from shared.signing import key_id

OLDEST_POSTGRESQL = 14
SKEW = timedelta(seconds=10)  # tolerated clock difference between hosts; leases and heartbeats take tens of seconds
# Bytes; enough for the programs and the compilation of a small model.
LITTLE_DISK, LITTLE_MEMORY = 10 * 10**9, 4 * 10**9
IMPORT_SECONDS = 300
BUILT = datetime(2026, 1, 1, tzinfo=UTC)  # a correct clock is later than this
OTHERS = {"MOBIZO_SERVER", "MOBIZO_TOKEN", "MOBIZO_PROFILE"}  # variables of the command `mobizo`
_COMPILER = "import server.compiler.program, server.compiler.export.backends"


def examine(settings: Settings, quick: bool = False, metadata: MetaData = Table.metadata) -> Iterator[Check]:
    """Yields the results of all checks. quick: skips the compiler.

    metadata: the tables whose columns the database must have.
    """
    yield from check_environment(os.environ)
    yield check_home(settings)
    yield check_key(settings)
    yield from check_database(settings, metadata)
    yield check_files(settings)
    yield check_disk(settings)
    yield check_memory(settings)
    if not quick:
        yield check_compiler()


def check_environment(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yields the variables that no program reads: of an earlier release, or misspelt."""
    names = [f"{PREFIX}{name}".upper() for name in Settings.model_fields]
    known = {*names, *(f"{name}_FILE" for name in names), *OTHERS}
    for name in sorted(environment):
        if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}AGENT_") and name not in known:
            similar = "".join(f"; did you mean {match}?" for match in get_close_matches(name, names, 1))
            detail = f"{name} is not a setting of this release and has no effect{similar}"
            yield Check("settings", "warn", detail, "docs/operations.md lists the settings; remove it")


def check_home(settings: Settings) -> Check:
    """Checks that the home exists and is accessible to this user only."""
    home = settings.home
    if not home.is_dir():
        return Check("home", "fail", f"{home} does not exist", "create it with `mobizo-server init`")
    stat = home.stat()
    if stat.st_uid != os.geteuid():
        return Check("home", "fail", f"{home} belongs to another user", f"run as that user, or `chown` {home}")
    if not os.access(home, os.W_OK | os.X_OK):
        return Check("home", "fail", f"{home} is not writable", f"`chmod 700 {home}`")
    if stat.st_mode & 0o077:
        return Check("home", "fail", f"other users can access {home}", f"`chmod 700 {home}`")
    return Check("home", "ok", f"{home}, accessible to this user only")


def check_key(settings: Settings) -> Check:
    """Checks that the signing key is readable by this user only."""
    try:
        key = load_key(settings.key_path)
    except MobizoError as error:
        return Check("key", "fail", error.detail)
    return Check("key", "ok", f"programs are signed by {key_id(key.public_key())}")


def check_database(settings: Settings, metadata: MetaData = Table.metadata) -> Iterator[Check]:
    """Checks that the database is reachable, recent enough and migrated, and that its clock agrees."""
    if settings.database_url is None and not settings.home.is_dir():
        yield Check("database", "fail", "there is no database without a home", "create it with `mobizo-server init`")
        return
    database = Database(settings.url, settings.tuning)
    try:
        with reached(database.engine) as connection:
            yield _version(connection)
            missing = lacking(connection)
            if missing:
                detail = f"{len(missing)} migrations of this release are not applied"
                yield Check("schema", "fail", detail, "run `mobizo-server migrate`")
            elif columns := missing_columns(connection, metadata):
                detail = f"the database lacks {len(columns)} columns of this release; the first is {columns[0]}"
                remedy = "an unreleased version made it: export its adapters with that version, and create a new home"
                yield Check("schema", "fail", detail, remedy)
            else:
                yield Check("schema", "ok", "every migration of this release is applied, and every column is there")
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
            return Check("database", "fail", f"SQLite uses a {mode} journal", "put the home on a local disk")
        return Check("database", "ok", f"SQLite {version}, write-ahead log")
    if int((connection.dialect.server_version_info or (0,))[0]) < OLDEST_POSTGRESQL:
        return Check("database", "fail", f"PostgreSQL {version}", f"upgrade it to {OLDEST_POSTGRESQL} or later")
    if not connection.scalar(text("SELECT pg_is_in_recovery()")):
        return Check("database", "ok", f"PostgreSQL {version}")
    return Check("database", "fail", "this PostgreSQL is a standby", "set MOBIZO_DATABASE_URL to its primary")


def _clock(connection: Connection, now: datetime) -> Check:
    remedy = "synchronize the clocks of all hosts by NTP; leases depend on them"
    if now < BUILT:
        return Check("clock", "fail", f"the clock shows {now:%Y-%m-%d}", remedy)
    latest = [connection.scalar(select(func.max(column))) for column in (WorkerProcess.seen_at, Device.last_seen_at)]
    if connection.dialect.name == "postgresql":
        database_time = connection.scalar(text("SELECT clock_timestamp()"))
        if database_time is not None and abs(database_time - now) > SKEW:
            detail = f"the clock differs by {abs(database_time - now).total_seconds():.0f} s from the database's clock"
            return Check("clock", "fail", detail, remedy)
    ahead = [moment for moment in latest if moment is not None and moment > now + SKEW]
    if ahead:
        detail = f"the database contains the future time {max(ahead):%Y-%m-%d %H:%M:%S} UTC"
        return Check("clock", "warn", detail, remedy)
    return Check("clock", "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC")


def check_files(settings: Settings) -> Check:
    """Checks that files can be written to the store."""
    try:
        open_artifacts(settings).check_writable()
    except (MobizoError, OSError) as error:
        why = error.detail if isinstance(error, MobizoError) else f"{error.strerror} ({error.filename})"
        return Check("files", "fail", why, "check MOBIZO_STORAGE_URL and its write permissions")
    return Check("files", "ok", "the store can be written")


def check_disk(settings: Settings) -> Check:
    """Checks that there is disk space for programs and uploads."""
    place = settings.home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / 1e9:.1f} GB free at {place}"
    if free < DISK_FLOOR_BYTES:
        remedy = f"free disk space; below {DISK_FLOOR_BYTES} bytes the server is not ready"
        return Check("disk", "fail", detail, remedy)
    if free < LITTLE_DISK:
        return Check("disk", "warn", detail, "a program of a large model may not fit")
    return Check("disk", "ok", detail)


def check_memory(settings: Settings) -> Check:
    """Checks that there is memory for compilations."""
    spare = int(psutil.virtual_memory().available)
    detail = f"{spare / 1e9:.1f} GB available"
    if spare < LITTLE_MEMORY:
        remedy = "compilations of larger models will be killed; run workers on another machine"
        return Check("memory", "warn", detail, remedy)
    limit = settings.compile_budget_bytes
    if limit is not None and limit > spare:
        detail += f", but MOBIZO_COMPILE_BUDGET_BYTES allows {limit / 1e9:.1f} GB for compilations"
        return Check("memory", "warn", detail, "lower MOBIZO_COMPILE_BUDGET_BYTES")
    return Check("memory", "ok", detail)


def check_compiler() -> Check:
    """Checks that the compiler and ExecuTorch can be imported."""
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _COMPILER],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            "compiler",
            "fail",
            f"importing the compiler took more than {IMPORT_SECONDS} s",
            "check the load of this machine",
        )
    if process.returncode != 0:
        why = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return Check("compiler", "fail", why, "install mobizo[server]; only workers need the compiler")
    return Check("compiler", "ok", "ExecuTorch and the compiler load")
