"""What a server refuses to start with, and the one way round."""

import subprocess
import sys

import httpx
import pytest
from pydantic import ValidationError

from server.operations.safety import Tls, Unsafe, check_safe
from server.settings import Settings
from tests.server.operations.test_serving import running

S3 = {"storage_url": "s3://files", "storage_access_key_id": "mine"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", "localhost.example.org", ""])
def test_other_machines_need_tls(host, tmp_path):
    with pytest.raises(Unsafe, match="--tls-cert"):
        check_safe(Settings(host=host), None, insecure=False)
    assert len(check_safe(Settings(host=host), None, insecure=True)) == 1
    assert check_safe(Settings(host=host), Tls(tmp_path, tmp_path), insecure=False) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"forwarded_allow_ips": "*"},
        {"forwarded_allow_ips": "10.0.0.1, 0.0.0.0/0"},
        {"forwarded_allow_ips": "::/0"},
        {"database_url": "postgresql+psycopg://mobizo:@db/mobizo"},
        {"database_url": "postgresql+psycopg://mobizo:postgres@db/mobizo"},
        {"database_url": "postgresql+psycopg://somebody:somebody@db/mobizo"},
        S3 | {"storage_secret_access_key": ""},
        S3 | {"storage_secret_access_key": "minioadmin"},
        S3 | {"storage_secret_access_key": "ChangeMe"},
        S3 | {"storage_secret_access_key": "mine"},
    ],
)
def test_what_is_unsafe_and_the_way_round(changes):
    with pytest.raises(Unsafe, match="--insecure-dev"):
        check_safe(Settings(**changes), None, insecure=False)
    assert len(check_safe(Settings(**changes), None, insecure=True)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"forwarded_allow_ips": "10.0.0.1,192.0.2.0/24,2001:db8::1"},
        {"database_url": "postgresql+psycopg://mobizo@db/mobizo"},
        {"database_url": "postgresql+psycopg://mobizo:vTq1zJ0e4s@db/mobizo"},
        {"database_url": "postgresql+psycopg:///mobizo?host=/run/postgresql"},
        {"delivery": "accel"},
        *({"host": host} for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")),
        S3 | {"storage_secret_access_key": "vTq1zJ0e4s"},
    ],
)
def test_what_is_not(changes):
    assert check_safe(Settings(**changes), None, insecure=False) == []


def test_nginx_s_answers_are_for_nginx(tmp_path):
    tls = Tls(tmp_path, tmp_path)
    with pytest.raises(Unsafe, match="accel"):
        check_safe(Settings(host="0.0.0.0", delivery="accel"), tls, insecure=False)
    nginx_settings = Settings(host="0.0.0.0", delivery="accel", forwarded_allow_ips="10.0.0.7")
    assert check_safe(nginx_settings, tls, insecure=False) == []


@pytest.mark.parametrize("value", ["nginx", "10.0.0.1 10.0.0.2", "10.0.0.300", "10.0.0.0/33"])
def test_addresses_that_are_none(value):
    with pytest.raises(ValidationError, match="forwarded_allow_ips"):
        Settings(forwarded_allow_ips=value)


def test_the_way_round_is_loud(home, monkeypatch):
    for name, value in home.settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MOBIZO_FORWARDED_ALLOW_IPS", "*")
    command = [sys.executable, "-m", "server.cli.main", "run", "--port", "0", "--workers", "0"]
    failed_start = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (failed_start.returncode, failed_start.stdout) == (2, "")
    assert failed_start.stderr.startswith("error: MOBIZO_FORWARDED_ALLOW_IPS")
    process = subprocess.Popen([*command, "--insecure-dev"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        warnings = [process.stderr.readline(), process.stderr.readline()]
    finally:
        process.kill()
        process.communicate()
    assert [line.startswith("INSECURE: ") for line in warnings] == [True, True]
    assert "MOBIZO_FORWARDED_ALLOW_IPS" in warnings[1]


@pytest.mark.parametrize(("proxies", "trusted"), [("", False), ("127.0.0.1", True)])
def test_whose_request_it_is_only_named_proxies_say(home, monkeypatch, proxies, trusted):
    settings = home.settings.model_copy(update={"address_rate": 0.001, "forwarded_allow_ips": proxies})
    monkeypatch.setattr(home, "settings", settings)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own: nothing of ours
    with running(home, "--workers", "0") as (_, url):
        answers = [
            httpx.get(f"{url}/v1/server", headers={"X-Forwarded-For": address}).status_code
            for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2")
        ]
    assert answers == [200, 429, 200 if trusted else 429]
