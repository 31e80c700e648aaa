"""Fixtures of the agent's tests: programs, homes, commands, daemons, and what runs a program."""

import subprocess
import threading

import pytest
import structlog

from device_agent.daemon.daemon import Daemon
from device_agent.daemon.reporting import Display
from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import RUNNER_VARIABLE
from device_agent.training.run_directory import RunDirectory
from tests.device_agent.commands import agent, invoke, refused, start_run
from tests.device_agent.homes import enrolled, home, server, server_key
from tests.device_agent.native import built_runner
from tests.device_agent.service import call, environment, service, service_home
from tests.device_agent.tiny import (
    base,
    clipped,
    compile_tiny,
    dataset,
    directional,
    gaussian,
    gradient,
    program,
    rademacher,
    stored,
)

__all__ = [  # fixtures
    "agent",
    "base",
    "call",
    "clipped",
    "compile_tiny",
    "dataset",
    "directional",
    "enrolled",
    "environment",
    "gaussian",
    "gradient",
    "home",
    "invoke",
    "program",
    "rademacher",
    "refused",
    "server",
    "server_key",
    "service",
    "service_home",
    "start_run",
    "stored",
]


@pytest.fixture(autouse=True)
def plain_logs():
    """Log lines as structlog prints them by itself, whatever tests before these told it."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of a size such as 2m; returns its path. Skips where that is not allowed."""
    mounted = []

    def mount(size):
        path = tmp_path / f"disk-{size}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("only root can mount a disk")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="session")
def runner_directory():
    """The installed native runner: mobizo-runner, and lib/ beside it."""
    return built_runner()


@pytest.fixture
def launcher(request):
    """What runs a daemon's programs: the native runner, which starts in a moment, or Python if a test asks for it.

    What a daemon sees is the same by either: the executors' own contract holds them to that.
    """
    if getattr(request, "param", "native") == "python":
        return PythonLauncher()
    return RunnerLauncher(request.getfixturevalue("runner_directory"))


@pytest.fixture
def launchers(launcher):
    """Selects the launcher for every program."""
    return lambda _manifest: launcher


@pytest.fixture
def without_runner(monkeypatch, tmp_path):
    """No native runner is found."""
    monkeypatch.setenv(RUNNER_VARIABLE, str(tmp_path / "no-runner"))


@pytest.fixture
def make(dataset, launchers):
    """Makes a daemon of any home."""
    daemons = []

    def make(home, data=None, **options):
        display = Display(home)
        display.__enter__()
        options = {"pause_seconds": 0.1, "launchers": launchers} | options
        daemons.append(Daemon(home, data or {"movies": dataset}, display, **options))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def daemon(make, enrolled):
    return make(enrolled)


@pytest.fixture
def in_background():
    """Runs a daemon in a thread beside the test, and stops it after; returns the thread and a list for its end."""
    threads = []

    def begin(daemon, once=False):
        ends = []
        thread = threading.Thread(target=lambda: ends.append(daemon.run(once)))
        threads.append((daemon, thread))
        thread.start()
        return thread, ends

    yield begin
    for daemon, thread in threads:
        daemon.stop()
        thread.join(60)
        assert not thread.is_alive()
