"""The daemon as a person on its machine meets it: status, pause, stop, logs, systemd, and no door to the network."""

import json
import re
import signal
import socket

import psutil
import pytest

from device_agent.daemon.reporting import log_path

MAX_IDLE_BYTES = 80_000_000  # with the pages of the training loop, which runs in this process


@pytest.fixture
def systemd(tmp_path):
    """A datagram socket as systemd's, and its address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        yield listener, str(tmp_path / "notify")


@pytest.fixture
def daemon(start_run, server, systemd):
    """A daemon at work, started as systemd starts one."""
    process = start_run(notify={"NOTIFY_SOCKET": systemd[1]})
    server.wait_for(lambda: ("POST", "leases") in server.calls)
    return process


def test_an_idle_daemon_says_so_listens_to_nobody_outside_and_stops_when_told(daemon, agent, home):
    status = agent("status")
    assert "the server has no job for this device" in status.stdout
    listening = [c for c in psutil.Process(daemon.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening == []
    assert agent("stop").stdout == "stopped\n"
    assert daemon.wait(30) == 0
    assert "mobizo-agent run" in agent("stop", status=1).stderr
    assert "mobizo-agent run" in agent("status").stdout


def test_an_idle_daemon_is_small_before_and_after_a_job(daemon, server, rademacher):
    process = psutil.Process(daemon.pid)
    assert process.memory_info().rss < MAX_IDLE_BYTES
    server.add_job(rademacher, steps=2)
    server.wait_for(lambda: server.completions)
    before = server.calls.count(("POST", "leases"))
    server.wait_for(lambda: server.calls.count(("POST", "leases")) > before)
    assert process.memory_info().rss < MAX_IDLE_BYTES
    assert not process.children(recursive=True)
    mapped = {entry.path for entry in process.memory_maps()}
    assert not [path for path in mapped if "torch" in path or "executorch" in path]


def test_a_pause_outlives_the_daemon(agent, enrolled, server, dataset, rademacher):
    server.add_job(rademacher, steps=1)
    assert "no agent is running" in agent("pause").stdout
    run = ("run", "--once", "--data", f"movies={dataset}")
    assert "paused by the user" in agent(*run, status=1).stderr
    assert ("POST", "leases") not in server.calls
    assert "no agent is running" in agent("resume").stdout
    agent(*run)


def test_systemd_hears_that_it_is_up_that_it_trains_and_that_it_ends(daemon, systemd, server, rademacher):
    listener, _ = systemd
    assert listener.recv(4096) == b"READY=1"
    server.add_job(rademacher, steps=20_000, evaluation_interval=1000)
    messages = []
    while not any("training" in text for text in messages):
        messages.append(listener.recv(4096).decode())
    assert "WATCHDOG=1\nSTATUS=training" in messages[-1]
    daemon.send_signal(signal.SIGTERM)
    while messages[-1] != "STOPPING=1":
        messages.append(listener.recv(4096).decode())
    assert daemon.wait(30) == 0


def test_the_log_is_kept_for_whoever_asks(agent, enrolled, home, server, rademacher, dataset):
    assert agent("logs").stdout == ""
    server.add_job(rademacher, steps=1)
    agent("run", "--once", "--data", f"movies={dataset}")
    events = [json.loads(line) for line in agent("logs", "--json").stdout.splitlines()]
    assert [event["event"] for event in events][:: len(events) - 1] == ["job", "job ended"]
    assert events[-1]["outcome"] == "completed"
    (last,) = agent("logs", "-n", "1").stdout.splitlines()
    assert re.search(r"job ended +job=job-1 outcome=completed$", last)
    assert log_path(home.path).stat().st_mode & 0o077 == 0
