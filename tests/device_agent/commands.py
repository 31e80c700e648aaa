"""The command `mobizo-agent`, in a process of its own and in this one."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from device_agent.cli.app import app
from device_agent.cli.main import main
from tests.device_agent.native import ROOT


def run_agent(home, *arguments, before=(), status=0, **options):
    """Runs `mobizo-agent` to its end in a home, with this exit status. before: the words of a command that runs it."""
    process = subprocess.run(
        [*before, sys.executable, "-m", "device_agent", *arguments],
        cwd=ROOT,
        env=os.environ | {"MOBIZO_AGENT_HOME": str(home.path)},
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert process.returncode == status, process.stdout + process.stderr
    return process


def start_agent(home, *arguments, notify=None, **options):
    """Starts `mobizo-agent` in a home. notify: where systemd hears it."""
    command = [sys.executable, "-u", "-m", "device_agent", *arguments]
    variables = os.environ | {"MOBIZO_AGENT_HOME": str(home.path)} | (notify or {})
    return subprocess.Popen(command, cwd=ROOT, env=variables, **options)


@pytest.fixture
def agent(home):
    """Runs `mobizo-agent` to its end in the test's home."""
    return lambda *arguments, **options: run_agent(home, *arguments, **options)


@pytest.fixture
def invoke(home):
    """Runs `mobizo-agent` in this process, in the test's home; returns its output."""

    def invoke(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments), "--home", str(home.path)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


@pytest.fixture
def refused(home, monkeypatch, capsys):
    """Runs `mobizo-agent` in this process to an error, in the test's home; returns exit status and standard error."""

    def refused(*arguments):
        monkeypatch.setenv("MOBIZO_AGENT_HOME", str(home.path))
        monkeypatch.setattr(sys, "argv", ["mobizo-agent", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert output.out == ""
        return ended.value.code, output.err

    return refused


@pytest.fixture
def start_run(enrolled, dataset):
    """Starts `mobizo-agent run` in the enrolled home; what of it still runs after the test is killed."""
    processes, null = [], subprocess.DEVNULL

    def start(*options, notify=None):
        command = ("run", *options, "--data", f"movies={dataset}", "--json")
        pipes = {"stdout": null, "stderr": null, "start_new_session": True}
        processes.append(start_agent(enrolled, *command, notify=notify, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
