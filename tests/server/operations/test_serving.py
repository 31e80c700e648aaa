"""Running a server as an operator does: safe by default, one command, nothing left behind."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import contextmanager

import httpx
import psutil
import pytest

from server.serving import listen
from server.web.connections import ConnectionLimits
from shared.errors import Unavailable
from tests.certificate import loopback_certificate
from tests.server.actors import job_request
from tests.server.homes import alive, eventually

PATIENCE = 60
LIMITS = ConnectionLimits(total=10, of_address=10)


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(Unavailable, match="cannot listen"):
        listen("127.0.0.1", listener.getsockname()[1], LIMITS)


@contextmanager
def running(home, *options):
    """`mobizo-server run` on a free port: its process and URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "run", "--port", "0", *options],
        env=os.environ | home.settings.environment() | {"MOBIZO_PORT": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield process, re.search(r"https?://\S+", line).group()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def family(process):
    """All processes that a server started."""
    return psutil.Process(process.pid).children(recursive=True)


def wait_for_exit(processes):
    eventually(lambda: not any(alive(child.pid) for child in processes), PATIENCE)


def test_one_command_serves_over_tls_replaces_a_dead_worker_and_stops(home, tmp_path):
    certificate, key = loopback_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate)
    headers = {"Authorization": f"Bearer {home.token('app')}"}
    with (
        running(home, "--tls-cert", str(certificate), "--tls-key", str(key)) as (process, url),
        httpx.Client(base_url=url, headers=headers, verify=trust) as client,
    ):
        first = eventually(lambda: family(process))[0]
        first.kill()
        job = client.post("/v1/jobs", json=job_request()).json()
        eventually(lambda: client.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready")
        children = family(process)
        assert len(children) == 1
        assert children[0].pid != first.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        wait_for_exit(children)


def test_a_killed_server_leaves_nothing_behind(home):
    home.behave(hang=True)
    with running(home) as (process, url):
        token = home.token("app")
        httpx.post(f"{url}/v1/jobs", json=job_request(), headers={"Authorization": f"Bearer {token}"})
        eventually(home.starts)
        children = family(process)
        assert len(children) == 2
        process.kill()
        wait_for_exit(children)
