"""Files sent by nginx, with the configuration that we ship, and by a bucket, to our own client."""

import dataclasses
import os
import ssl
from pathlib import Path

import httpx
import pytest

from server.settings import Delivery
from server.storage.opening import open_artifacts
from server.web import downloads
from shared.transport import Transport
from tests.certificate import loopback_certificate
from tests.server.nginx import Missing, free_ports, nginx
from tests.server.web.test_ranges import CONTENT, url, weights

__all__ = ["url", "weights"]  # fixtures

DATABASES = ("sqlite",)
SHIPPED = Path(__file__).parents[3] / "deploy" / "nginx.conf"
PRIVATE = "/etc/letsencrypt/live/mobizo.example.org"


@pytest.fixture
def settle(home, fleet, standing):
    """Changes the running server's settings."""
    app, _ = standing

    def change(**changes):
        home.settings = home.settings.model_copy(update=changes)
        app.state.mobizo = dataclasses.replace(app.state.mobizo, settings=home.settings, artifacts=home.artifacts)

    return change


def replace_all(text, changes):
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def front(home, fleet, settle, tmp_path, monkeypatch):
    """The URL of a real nginx with the shipped configuration, in front of the server."""
    settle(delivery=Delivery.ACCEL)
    certificate, key = loopback_certificate(tmp_path)
    port, plain = free_ports(2)
    shipped = replace_all(
        SHIPPED.read_text(),
        {
            "server 127.0.0.1:8000;": f"server {httpx.URL(fleet.url).netloc.decode()};",
            "listen 80;": f"listen 127.0.0.1:{plain};",
            "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
            f"{PRIVATE}/fullchain.pem": str(certificate),
            f"{PRIVATE}/privkey.pem": str(key),
            "/var/lib/mobizo/server/artifacts/objects/;": f"{home.settings.artifacts_path / 'objects'}/;",
        },
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    try:
        with nginx(tmp_path / "nginx", shipped, port):
            yield f"https://127.0.0.1:{port}"
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture
def nginx_client(front, device, monkeypatch):
    """The device's client, speaking to nginx."""
    trusted = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    client = httpx.Client(
        base_url=front, verify=trusted, headers={"Authorization": f"Bearer {device.token}"}, timeout=30
    )
    yield client
    client.close()


def test_nginx_sends_what_the_server_allowed(nginx_client, url, weights):
    response = nginx_client.get(url)
    assert response.status_code == 200
    assert response.content == CONTENT
    assert response.headers["etag"] == f'"{weights["sha256"]}"'
    assert response.headers["server"].startswith("nginx")
    assert "immutable" in response.headers["cache-control"]
    assert response.headers["content-disposition"].startswith("attachment")
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-request-id"]
    assert "x-accel-redirect" not in response.headers


def test_nginx_sends_parts_by_our_tag(nginx_client, url, weights):
    ours = {"Range": "bytes=1000-1999", "If-Range": f'"{weights["sha256"]}"'}
    part = nginx_client.get(url, headers=ours)
    assert (part.status_code, part.content) == (206, CONTENT[1000:2000])
    assert part.headers["content-range"] == f"bytes 1000-1999/{len(CONTENT)}"
    other = nginx_client.get(url, headers={**ours, "If-Range": '"other"'})
    assert (other.status_code, other.content) == (200, CONTENT)
    several = nginx_client.get(url, headers={"Range": "bytes=0-1,5-6"})
    assert (several.status_code, several.content) == (200, CONTENT)


def test_nginx_sends_a_repositorys_files_uncompressed(front, nginx_client, fleet, app, device, lease):
    version = device.finish(lease)
    path = "/default/alice-movies/resolve/main/lora_B.safetensors"
    headers = {"Authorization": f"Bearer {app.token}", "Accept-Encoding": "gzip"}
    for answer in (nginx_client.head(path, headers=headers), nginx_client.get(path, headers=headers)):
        assert answer.status_code == 200
        assert answer.headers["server"].startswith("nginx")
        assert answer.headers["x-repo-commit"] == version["revision"]
        assert answer.headers["etag"] == f'"{version["sha256"]}"'
        assert answer.headers["content-length"] == str(version["size"])
        assert "no-transform" in answer.headers["cache-control"]
        assert "content-encoding" not in answer.headers
    part = nginx_client.get(path, headers=headers | {"Range": "bytes=0-0"})
    assert (part.status_code, part.headers["content-range"]) == (206, f"bytes 0-0/{version['size']}")
    assert part.headers["x-repo-commit"] == version["revision"]
    missing = nginx_client.get("/default/nothing/resolve/main/README.md", headers=headers)
    assert (missing.status_code, missing.headers["x-error-code"]) == (404, "RepoNotFound")


def test_the_rest_is_the_servers_own_answer(nginx_client, url, weights, problem):
    tag = f'"{weights["sha256"]}"'
    assert nginx_client.get(url, headers={"If-None-Match": tag}).status_code == 304
    problem(nginx_client.get(url, headers={"Range": "bytes=999999999-"}), 416, "range-not-satisfiable")
    head = nginx_client.head(url)
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(CONTENT)))
    assert head.headers["etag"] == tag
    assert nginx_client.get("/healthz").json() == {"status": "ok"}


def test_nobody_gets_past_the_server(nginx_client, front, fleet, url, weights, problem):
    inside = f"/mobizo-files/{weights['sha256'][:2]}/{weights['sha256']}"
    for path in (inside, "/mobizo-files/../../keys/manifest.ed25519", "/mobizo-files/%2e%2e/%2e%2e/mobizo.sqlite3"):
        response = nginx_client.get(path)
        assert response.status_code in (400, 404)
        assert CONTENT[:100] not in response.content
    problem(nginx_client.get(url, headers={"Authorization": "Bearer nobody"}), 401, "unauthorized")
    stranger = fleet.device(name="other")
    problem(nginx_client.get(url, headers={"Authorization": f"Bearer {stranger.token}"}), 404, "not-found")


def test_without_nginx_the_server_sends_the_file_itself(front, device, url):
    assert device.get(url).content == CONTENT


def test_a_damaged_file_never_looks_whole(home, device, url, weights):
    path = home.artifacts._path(weights["sha256"])
    path.chmod(0o600)
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(httpx.RemoteProtocolError):
        device.get(url)
    assert device.get("/healthz").status_code == 200


def test_the_locations_agree():
    assert f"location {downloads.ACCEL_PREFIX} {{" in SHIPPED.read_text()


@pytest.fixture
def bucket(home, settle, s3, monkeypatch):
    """The server's files lie in a bucket, which sends all but the smallest."""
    monkeypatch.setattr(downloads, "REDIRECT_BYTES", 100_000)
    changes = s3.settings() | {"delivery": Delivery.REDIRECT}
    tokenizer = (home.source / "tokenizer.json").read_bytes()
    settings = type(home.settings)(**(home.settings.model_dump() | changes))
    home.artifacts = open_artifacts(settings)
    home.artifacts.put(tokenizer)
    settle(**{name: getattr(settings, name) for name in settings.model_fields_set})


def test_a_bucket_sends_to_whom_the_server_sends_there(bucket, device, url, s3):
    answer = device.get(url)
    assert answer.status_code == 307
    assert answer.content == b""
    assert "no-store" in answer.headers["cache-control"]
    location = answer.headers["location"]
    assert location.startswith(s3.url)
    assert httpx.get(location).content == CONTENT
    head = device.head(url)
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(CONTENT)))


def test_our_client_follows_and_goes_on(bucket, device, url, weights, fleet, tmp_path):
    (tmp_path / "w.part").write_bytes(CONTENT[:100_000])
    progress_calls = []
    with Transport(fleet.url, device.token) as transport:
        for _ in range(2):
            transport.download(
                url,
                tmp_path / "w",
                size=len(CONTENT),
                sha256=weights["sha256"],
                progress=lambda *at: progress_calls.append(at),
            )
            assert (tmp_path / "w").read_bytes() == CONTENT
    assert min(progress_calls)[0] > 0
    assert progress_calls[0][0] > 100_000  # it went on


def test_small_files_and_forbidden_ranges_are_sent_by_the_server(bucket, device, lease, url, weights):
    tokenizer = next(file for file in lease["manifest"]["manifest"]["files"] if file["role"] == "tokenizer")
    assert device.get(f"/v1/files/{tokenizer['sha256']}").status_code == 200
    response = device.get(url, headers={"Range": "bytes=10-", "If-Range": '"other"'})
    assert (response.status_code, response.content) == (200, CONTENT)
    part = device.get(url, headers={"Range": "bytes=10-", "If-Range": f'"{weights["sha256"]}"'})
    assert part.status_code == 307
