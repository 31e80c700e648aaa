"""Builds the native runner from its sources with CMake, for this machine or with a cross toolchain."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from device_agent.errors import NoRunner
from device_agent.runner.location import (
    EXECUTORCH,
    POLL_SECONDS,
    PROGRAM,
    SOURCES,
    RunnerLocation,
    check_starts,
    never,
)
from device_agent.runner.toolchain import (
    CMAKE_WHEEL,
    EXECUTORCH_WHEEL,
    NINJA_WHEEL,
    Report,
    check_compiler,
    check_cross_compiler,
    fetch_wheel,
    find_cmake,
    find_generator,
    installed_executorch,
)
from shared.errors import Unavailable

# The NDK's toolchain file builds for 32 bits unless told; ExecuTorch's own Android builds are for this API level.
ANDROID_ABIS = {"android-arm64": "arm64-v8a", "android-x86_64": "x86_64"}
ANDROID_PLATFORM = "android-26"
# One bundle with its own C library serves both: neither an NDK nor a device's glibc matters (bundle.cmake).
BUNDLED = ("linux-aarch64", "android-arm64")
BUNDLE_MACHINE = "aarch64"
BUNDLE_TOOLCHAIN = SOURCES / "aarch64-linux.cmake"
GRACE_SECONDS = 5.0
LOG_LINES = 3  # of the build's log, in an error
COUNTED = re.compile(rb"^\[\s*(\d+/\d+|\d+%)\]")  # how far Ninja or make says it is
ERROR = re.compile(r"\berror\b|undefined reference", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """Build options. executorch: ExecuTorch to build against; toolchain: CMake toolchain file."""

    executorch: Path | None = None
    toolchain: Path | None = None

    def bundles(self, location: RunnerLocation) -> bool:
        """Whether a build is the aarch64 bundle: no option is set, and it is for another machine."""
        return location.system in BUNDLED and not location.native and self.executorch is None and self.toolchain is None


class Stopped(NoRunner):
    """The build of the runner was stopped; it restarts when a runner is needed."""


def build_runner(
    location: RunnerLocation, report: Report, options: Options | None = None, stop: Callable[[], bool] = never
) -> Path:
    """Builds and installs the runner; returns its directory. Waits for another process's build first.

    Raises NoRunner if a tool is missing or compilation fails, Unavailable if a download fails, Untrusted if a
    download's hash differs, Stopped if `stop` returns true.
    """
    with location.lock(stop):
        return build_locked(location, report, options or Options(), stop)


def build_locked(location: RunnerLocation, report: Report, options: Options, stop: Callable[[], bool]) -> Path:
    """Like `build_runner`; the caller holds the location's lock."""
    check_options(location, options)
    try:
        with location.log.open("wb", buffering=0) as log, location.staging_directory() as staging:
            runner = _Build(location, staging, log, report, stop).make(options)
            return location.put(runner)
    except OSError as error:
        raise Unavailable(f"the runner could not be built in {location.directory}: {error}") from error


def check_options(location: RunnerLocation, options: Options) -> None:
    """Raises NoRunner if a build cannot start; fast."""
    if options.bundles(location):
        check_cross_compiler()
        return
    if options.executorch is None and not location.native:
        raise NoRunner(
            f"a runner for {location.system} is built against an ExecuTorch built for it: give its directory with "
            "--executorch-root (docs/android.md shows how)"
        )
    if options.toolchain is None:
        check_compiler()


class _Build:
    """One build in a temporary directory."""

    def __init__(
        self, location: RunnerLocation, staging: Path, log: BinaryIO, report: Report, stop: Callable[[], bool]
    ) -> None:
        self._location, self._staging, self._log, self._report, self._stop = location, staging, log, report, stop

    def make(self, options: Options) -> Path:
        """Returns a directory with the finished runner, tested if it is for this machine."""
        bundle = options.bundles(self._location)
        if bundle:
            root = self._fetched_executorch(BUNDLE_MACHINE)
        else:
            root = options.executorch or installed_executorch(EXECUTORCH) or self._fetched_executorch()
        toolchain = BUNDLE_TOOLCHAIN if bundle else options.toolchain
        cmake = find_cmake() or self._fetched_cmake()
        generator, program = find_generator() or self._fetched_ninja()
        build, installed = self._staging / "build", self._staging / "made"
        self._report(f"building the runner for {self._location.system} against {root}")
        configure: list[str | Path] = [
            *(cmake, "-S", self._location.sources, "-B", build, "-G", generator),
            f"-DCMAKE_MAKE_PROGRAM={program}",
            f"-DEXECUTORCH_ROOT={root.resolve()}",
            f"-DMOBIZO_VERSION={version('mobizo')}",
        ]
        if toolchain is not None:
            configure.append(f"-DCMAKE_TOOLCHAIN_FILE={toolchain.resolve()}")
        if bundle:
            configure.append("-DMOBIZO_BUNDLE=ON")
        elif abi := ANDROID_ABIS.get(self._location.system):
            configure += [f"-DANDROID_ABI={abi}", f"-DANDROID_PLATFORM={ANDROID_PLATFORM}"]
        self._need(configure, "CMake could not configure the runner")
        self._need([cmake, "--build", build, "--parallel", str(os.cpu_count() or 1)], "the runner does not compile")
        self._need([cmake, "--install", build, "--prefix", installed, "--strip"], "the runner could not be installed")
        if not (installed / PROGRAM).is_file():
            raise NoRunner(f"the build made no {PROGRAM}; see {self._location.log}")
        if self._location.native:
            # What was built against must not be needed: the wheel goes away.
            shutil.rmtree(self._staging / "executorch", ignore_errors=True)
            check_starts(installed)
        return installed

    def _fetched_executorch(self, machine: str | None = None) -> Path:
        fetch_wheel(EXECUTORCH_WHEEL, self._staging, self._run, self._report, machine)
        return self._staging / "executorch"

    def _fetched_cmake(self) -> Path:
        fetch_wheel(CMAKE_WHEEL, self._staging, self._run, self._report)
        return self._staging / "cmake" / "data" / "bin" / "cmake"

    def _fetched_ninja(self) -> tuple[str, Path]:
        fetch_wheel(NINJA_WHEEL, self._staging, self._run, self._report)
        return "Ninja", self._staging / NINJA_WHEEL.prefixes[0]

    def _need(self, command: Sequence[str | Path], failure: str) -> None:
        start = self._location.log.stat().st_size
        if self._run(command) != 0:
            raise NoRunner(f"{failure}; see {self._location.log}: {self._reason(start)}")

    def _run(self, command: Sequence[str | Path]) -> int:
        """Runs a command with its output in the log and reports progress; returns its exit status. Raises Stopped."""
        self._log.write(" ".join(("$", *map(str, command))).encode() + b"\n")
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that compilers can be ended with it
        )
        last_report = b""
        try:
            while True:
                try:
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if self._stop():
                        raise Stopped from None
                    last = self._last_count()
                    if last and last != last_report:
                        self._report(f"compiling {last.decode()}")
                        last_report = last
        finally:
            if process.poll() is None:
                _end(process)

    def _last_count(self) -> bytes:
        """Returns the build tool's progress such as 3/9, or an empty string."""
        with self._location.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            counts = [match[1] for line in log.read().splitlines() if (match := COUNTED.match(line))]
        return counts[-1] if counts else b""

    def _reason(self, start: int) -> str:
        """Returns the first error lines of the log since byte `start`, or else its last lines."""
        with self._location.log.open("rb") as log:
            log.seek(start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()[1:] if line.strip()]
        errors = [line for line in lines if ERROR.search(line)]
        return " / ".join(errors[:LOG_LINES] or lines[-LOG_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminates a process and its children; Ninja forwards the signal to its compilers."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def directory_bytes(directory: Path) -> int:
    """Returns the size of a runner's files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
