"""The native runner's directory on this device.

DIRECTORY/PLATFORM/
    VERSION-EXECUTORCH-SOURCES/   a ready runner: mobizo-runner, and lib/ with the libraries that it links
    aside-*/                      a build in progress; removed by the next build
    build.log                     output of the last build
    failed.json                   remembered failures
    lock                          held while a runner is installed
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from device_agent.durable import sync_directory, write_durably
from device_agent.errors import NoRunner
from shared.elf import HEADER_BYTES, wrong_machine

EXECUTORCH = "1.5.1"  # the release that the runner is built against
PROGRAM = "mobizo-runner"
RUNNER_VARIABLE = "MOBIZO_AGENT_RUNNER"  # a directory with a runner made elsewhere, such as by a package
SOURCES = Path(__file__).parent
SOURCE_SUFFIXES = frozenset({".txt", ".cmake", ".cpp", ".hpp"})
HASH_DIGITS = 16  # of the sources, in a directory's name
START_SECONDS = 60.0  # for `mobizo-runner version`, on a slow and busy device
POLL_SECONDS = 0.2


def never() -> bool:
    """A stop function that never stops."""
    return False


def host_platform() -> str:
    """Returns this machine's platform as runner builds name it: linux-x86_64, linux-aarch64."""
    return f"{platform.system()}-{platform.machine()}".lower()


@functools.cache
def sources_sha256(sources: Path) -> str:
    """Returns the sha256 of a runner's sources: names and contents, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(path for path in sources.rglob("*") if path.suffix in SOURCE_SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def check_starts(directory: Path) -> None:
    """Raises NoRunner unless the runner in `directory` starts here and has this agent's version."""
    try:
        result = subprocess.run(
            [directory / PROGRAM, "version"], capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoRunner(f"the runner does not start on this device: {error}") from error
    if result.returncode != 0:
        raise NoRunner(f"the runner does not start on this device: {result.stderr.strip()[-300:]}")
    try:
        facts = json.loads(result.stdout)
        versions = (facts["version"], facts["executorch"])
    except (ValueError, KeyError, TypeError) as error:
        raise NoRunner(f"the runner does not say its version but {result.stdout.strip()[:100]!r}") from error
    if versions != (version("mobizo"), EXECUTORCH):
        raise NoRunner(
            f"the runner is of mobizo {versions[0]} and ExecuTorch {versions[1]}; "
            f"this agent is of mobizo {version('mobizo')} and wants ExecuTorch {EXECUTORCH}"
        )


def check_machine(directory: Path, system: str) -> None:
    """Raises NoRunner if the runner in `directory` is for another processor than the platform `system`."""
    with (directory / PROGRAM).open("rb") as file:
        machine = wrong_machine(file.read(HEADER_BYTES), system)
    if machine is not None:
        raise NoRunner(
            f"the runner in {directory} is for {machine} and the device is {system}; `mobizo-agent build-runner "
            f"--platform {system}` builds one for it, or the server's operator adds one"
        )


class Failure(BaseModel):
    """A remembered failure: reason, time (seconds since 1970) and validity in seconds."""

    reason: str
    at: float
    seconds: float | None


FAILURES = TypeAdapter(dict[str, Failure])


def packed_path(weights: Path) -> Path:
    """Returns where the native runner keeps the packed form of a weights file."""
    return weights.with_name(f"{weights.name}.packed")


class RunnerLocation:
    """The directory of the runner for a platform, these sources and these versions."""

    def __init__(self, directory: Path, system: str | None = None, sources: Path = SOURCES) -> None:
        """directory: of all runners. system: the platform; default: this machine's. sources: of the C++ program."""
        self.system = system or host_platform()
        self.sources = sources
        self.directory = directory / self.system
        name = f"{version('mobizo')}-{EXECUTORCH}-{sources_sha256(sources)[:HASH_DIGITS]}"
        self.path = self.directory / name
        self._checked: tuple[int, int] | None = None  # inode and mtime of the program that was seen to start

    @classmethod
    def within(cls, home: Path, system: str | None = None) -> RunnerLocation:
        """Returns the location in an agent's home."""
        return cls(home / "runners", system)

    @property
    def native(self) -> bool:
        """Whether the runner is for this machine and can be tested here."""
        return self.system == host_platform()

    @property
    def log(self) -> Path:
        """The log of the last build."""
        return self.directory / "build.log"

    def find(self) -> Path | None:
        """Returns the directory of a ready runner, or None. This machine's runner is started once to test it."""
        try:
            status = (self.path / PROGRAM).stat()
        except OSError:
            return None
        fingerprint = (status.st_ino, status.st_mtime_ns)
        if self.native and fingerprint != self._checked:
            try:
                check_starts(self.path)
            except NoRunner:
                return None
            self._checked = fingerprint
        return self.path

    @contextmanager
    def lock(self, stop: Callable[[], bool] = never) -> Iterator[None]:
        """Holds the exclusive lock for installing a runner. Raises NoRunner if `stop` returns true while waiting."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _locked(descriptor):
                if stop():
                    raise NoRunner("waiting for another build of the runner was stopped")
                time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def staging_directory(self) -> Iterator[Path]:
        """Yields a temporary directory to build in; removes those of killed builds."""
        for leftover in self.directory.glob("aside-*"):
            # A killed agent's compiler may still write there: what it adds now is removed by the next build.
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="aside-", dir=self.directory, ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    def put(self, directory: Path) -> Path:
        """Atomically installs the runner in `directory` and removes other versions."""
        for path in (*directory.rglob("*"), directory):
            sync_directory(path)  # which makes a file's bytes survive as well
        if self.path.exists():
            self.path.rename(directory.with_name("replaced"))
        directory.rename(self.path)
        sync_directory(self.directory)
        for entry in self.directory.iterdir():
            if entry.is_dir() and entry != self.path and not entry.name.startswith("aside-"):
                shutil.rmtree(entry)
        self._failures_path.unlink(missing_ok=True)
        return self.path

    def remember(self, key: str, reason: str, seconds: float | None) -> None:
        """Remembers that what is named `key` failed, for `seconds` or until a runner is installed."""
        failures = self._failures() | {key: Failure(reason=reason, at=time.time(), seconds=seconds)}
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(self._failures_path, FAILURES.dump_json(failures, indent=1))

    def remembered(self, key: str) -> str | None:
        """Returns why what is named `key` failed, if that is still valid."""
        failure = self._failures().get(key)
        if failure is None:
            return None
        # A clock that was set back must not make a failure last longer.
        counts = failure.seconds is None or 0 <= time.time() - failure.at < failure.seconds
        return failure.reason if counts else None

    @property
    def _failures_path(self) -> Path:
        return self.directory / "failed.json"

    def _failures(self) -> dict[str, Failure]:
        try:
            return FAILURES.validate_json(self._failures_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return {}


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def local_runner(home: Path) -> Path | None:
    """Returns the directory of this machine's runner if it is ready; downloads and builds nothing."""
    directory = os.environ.get(RUNNER_VARIABLE)
    return Path(directory) if directory else RunnerLocation.within(home).find()
