"""The compose files and the Dockerfile: what they promise, read from them. `test_topology` runs the hardened one."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from server.settings import Settings
from tests.certificate import loopback_certificate
from tests.server.nginx import Missing, nginx_program

ROOT = Path(__file__).resolve().parents[3]
FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = FILE["services"]
LAPTOP = yaml.safe_load((ROOT / "docker-compose.laptop.yml").read_text())["services"]
OURS = ("migrate", "server", "worker", "agent")


@pytest.fixture(params=[*SERVICES.items(), *LAPTOP.items()], ids=[*SERVICES, *(f"laptop-{name}" for name in LAPTOP)])
def service(request):
    return request.param[1]


def test_every_service_is_hardened_and_limited(service):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) > 0
    assert "privileged" not in service
    assert all(path.startswith("/") for path in service["tmpfs"])
    assert all(service[limit] for limit in ("mem_limit", "cpus", "pids_limit"))
    assert service["logging"]["driver"] == "json-file"  # which Podman has as well
    assert service["logging"]["options"]["max-size"]
    assert re.fullmatch(r".+:v?\d+\.\d+[\w.-]*", service["image"])  # pinned


def test_what_runs_on_is_watched_and_restarted():
    for name, service in SERVICES.items():
        if service["restart"] == "unless-stopped":
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert service["stop_grace_period"]
        else:
            assert service["restart"] == "on-failure"
    assert {name for name, service in SERVICES.items() if service["restart"] == "on-failure"} == {"migrate", "bucket"}
    grace = int(SERVICES["server"]["stop_grace_period"].removesuffix("s"))
    assert Settings.model_fields["grace_seconds"].default < grace
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["agent"]


def test_one_way_in():
    """All services are on a network that has no way out, and only nginx is published."""
    assert FILE["networks"]["inside"]["internal"] is True
    assert set(SERVICES["proxy"]["networks"]) == {"inside", "outside"}
    for name, service in SERVICES.items():
        assert set(service["networks"]) <= {"inside", "outside"}
        if name not in ("proxy", "agent"):
            assert service["networks"] == ["inside"], name
        assert ("ports" in service) == (name == "proxy")


def test_a_laptop_serves_itself_only():
    """Both services are on the host's network, the server is on the loopback interface, and nothing is published."""
    assert set(LAPTOP) == {"server", "agent"}
    for service in LAPTOP.values():
        assert service["network_mode"] == "host"
        assert "ports" not in service
        assert service["healthcheck"]["test"][0] == "CMD"
    assert "--host=127.0.0.1" in LAPTOP["server"]["command"]
    assert not [word for word in LAPTOP["server"]["command"] if "insecure" in word]
    assert LAPTOP["agent"]["build"]["target"] == "agent"
    assert "--executor=native" in LAPTOP["agent"]["command"]


def test_nginx_is_trusted_by_its_network_and_bounds_connections():
    (subnet,) = FILE["networks"]["inside"]["ipam"]["config"]
    assert SERVICES["server"]["environment"]["MOBIZO_FORWARDED_ALLOW_IPS"] == subnet["subnet"]
    for name in ("nginx.conf", "nginx-compose.conf"):
        text = (ROOT / "deploy" / name).read_text()
        for word in ("client_header_timeout", "client_body_timeout", "send_timeout", "limit_conn "):
            assert re.search(rf"^ +{word}", text, re.MULTILINE), (name, word)
        assert "X-Forwarded-For $remote_addr;" in text
    assert "./deploy/nginx-compose.conf:/etc/nginx/nginx.conf:ro" in SERVICES["proxy"]["volumes"]


def test_nginx_reads_its_configuration(tmp_path):
    (tmp_path / "tls").mkdir()
    certificate, key = loopback_certificate(tmp_path / "tls")
    text = (ROOT / "deploy" / "nginx-compose.conf").read_text()
    for name, path in (
        ("/run/secrets/tls-cert", certificate),
        ("/run/secrets/tls-key", key),
        ("/tmp/", f"{tmp_path}/"),
        ("server server:8443;", "server 127.0.0.1:8443;"),
    ):
        assert name in text
        text = text.replace(name, str(path))
    (tmp_path / "nginx.conf").write_text(text)
    try:
        program, environment = nginx_program()
    except Missing as error:
        pytest.skip(str(error))
    process = subprocess.run(
        [program, "-t", "-c", tmp_path / "nginx.conf", "-p", tmp_path],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_secrets_are_required_and_never_in_the_environment():
    assert set(FILE["secrets"]) == {"database-password", "storage-secret", "tls-cert", "tls-key"}
    for secret in FILE["secrets"].values():
        assert secret["file"].startswith("${MOBIZO_SECRETS:?")
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET|TOKEN", name) or value.startswith("/run/secrets/"), name
        texts = [json.dumps([service.get("environment"), service.get("command")])]
        mounted = [volume.split(":")[0] for volume in service.get("volumes", [])]
        texts += [(ROOT / path).read_text() for path in mounted if path.startswith("./deploy/")]
        secret_names = re.findall(r"/run/secrets/([\w-]+)", "\n".join(texts))
        assert set(secret_names) == set(service.get("secrets", []))


def test_the_settings_exist():
    fields = {f"MOBIZO_{name}".upper() for name in Settings.model_fields}
    for name in OURS[:3]:
        variables = set(SERVICES[name]["environment"])
        assert {variable.removesuffix("_FILE") for variable in variables} <= fields
    assert SERVICES["server"]["environment"] == SERVICES["worker"]["environment"] == SERVICES["migrate"]["environment"]
