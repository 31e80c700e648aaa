"""Running a server as an operator does: safe by default, one command, nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest

from server.serving import listen
from server.web.connections import ConnectionLimits
from shared.errors import Unavailable
from tests.server.conftest import alive, job_request

PATIENCE = 60
LIMITS = ConnectionLimits(total=10, of_address=10)


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Unavailable, match="cannot listen"):
        listen("127.0.0.1", taken.getsockname()[1], LIMITS)


def test_an_address_that_is_none():
    with pytest.raises(Unavailable, match="cannot listen"):
        listen("no.such.host.invalid", 0, LIMITS)


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


def gone(processes):
    deadline = time.monotonic() + PATIENCE
    while any(alive(child.pid) for child in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_command_serves_compiles_and_stops(home, number):
    with running(home) as (process, url):
        token = home.token("app")
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client:
            job = client.post("/v1/jobs", json=job_request()).json()
            deadline = time.monotonic() + PATIENCE
            while client.get(f"/v1/jobs/{job['id']}").json()["state"] != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.05)
        children = family(process)
        assert len(children) == 1
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        gone(children)


def test_a_killed_server_leaves_nothing_behind(home):
    home.behave(hang=True)
    with running(home) as (process, url):
        token = home.token("app")
        httpx.post(f"{url}/v1/jobs", json=job_request(), headers={"Authorization": f"Bearer {token}"})
        deadline = time.monotonic() + PATIENCE
        while not home.starts():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = family(process)
        assert len(children) == 2
        process.kill()
        gone(children)


def test_a_worker_that_dies_is_replaced(home):
    with running(home) as (process, _):
        deadline = time.monotonic() + PATIENCE
        while not family(process):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first = family(process)[0]
        first.kill()
        while not [child for child in family(process) if child.pid != first.pid]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_open_event_stream_does_not_keep_the_server(home):
    with running(home, "--workers", "0") as (process, url):
        token = home.token("app")
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client:
            job = client.post("/v1/jobs", json=job_request()).json()
            with client.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
                assert response.status_code == 200
                assert family(process) == []
                process.terminate()
                assert process.wait(PATIENCE) == 0


def test_tls(home, tmp_path):
    certificate, key = self_signed(tmp_path)
    with running(home, "--workers", "0", "--tls-cert", str(certificate), "--tls-key", str(key)) as (_, url):
        assert url.startswith("https://")
        assert httpx.get(f"{url}/healthz", verify=False).json() == {"status": "ok"}


def self_signed(directory):
    """A certificate for nobody and its key, PEM files."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    paths = directory / "cert.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
