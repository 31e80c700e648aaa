"""A version on disk: whole, gone on with where it broke off, and only what the server signed."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

from mobizo import Client, Pins
from shared.canonical import file_sha256
from shared.errors import BaseMismatch, RevisionNotFound, Untrusted
from shared.lora import load_adapter
from shared.registry import SignedAdapter
from shared.signing import new_private_key, parse_public, public_text, verify_adapter

NAME = "alice-movies"
PEFT = {"README.md", "adapter_config.json", "adapter_model.safetensors", "mobizo.json"}


@pytest.fixture
def versions(fleet, app, device):
    """Two versions, B = 0.5 and 0.25 throughout."""
    found = []
    for value in (0.5, 0.25):
        fleet.ready_job(app)
        found.append(device.finish(device.lease(), value))
    return found


@pytest.fixture
def client(fleet, app, versions):
    with Client(fleet.url, app.token) as client:
        yield client


def names(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(("revision", "number"), [("main", 2), ("v1", 1), ("1", 1), (1, 1), ("v2", 2)])
def test_a_directory_by_any_name_of_its_version(client, versions, tmp_path, revision, number):
    found = client.pull(NAME, tmp_path / "adapter", revision)
    assert (found.version, found.sha256) == (number, versions[number - 1]["sha256"])
    assert names(tmp_path / "adapter") == PEFT
    signed = SignedAdapter.model_validate_json((tmp_path / "adapter" / "mobizo.json").read_bytes())
    manifest = verify_adapter(signed, parse_public(client.server().public_key))
    assert (manifest.version, manifest.revision) == (number, found.revision)
    assert client.manifest(NAME, revision) == manifest


def test_raw_b_is_what_the_device_uploaded(client, versions, tmp_path):
    client.pull(NAME, tmp_path / "a", "v1", "raw")
    assert names(tmp_path / "a") == {"lora_B.safetensors", "mobizo.json"}
    path = tmp_path / "a" / "lora_B.safetensors"
    assert file_sha256(path) == versions[0]["sha256"]
    np.testing.assert_array_equal(load_adapter(path.read_bytes(), versions[0]["size_d"]), np.float32(0.5))


def test_what_is_there_is_not_fetched_again(client, tmp_path):
    client.pull(NAME, tmp_path / "a")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    config, tensors = tmp_path / "a" / "adapter_config.json", tmp_path / "a" / "adapter_model.safetensors"
    config.write_bytes(b"something else")
    client.pull(NAME, tmp_path / "a")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {config.name, "mobizo.json"}
    assert json.loads(config.read_bytes())["r"] == 2
    client.pull(NAME, tmp_path / "a", "v1")
    assert before[tensors.name] != tensors.stat().st_mtime_ns


def test_what_broke_off_goes_on(client, tmp_path):
    client.pull(NAME, tmp_path / "whole")
    data = (tmp_path / "whole" / "adapter_model.safetensors").read_bytes()
    part = tmp_path / "a" / "adapter_model.safetensors.part"
    part.parent.mkdir()
    part.write_bytes(data[:100])
    seen = []
    client.pull(NAME, part.parent, progress=lambda name, have, size: seen.append((name, have, size)))
    assert names(part.parent) == PEFT
    assert (part.parent / "adapter_model.safetensors").read_bytes() == data
    assert seen[-1] == ("adapter_model.safetensors", len(data), len(data))
    part.write_bytes(bytes(100))
    (part.parent / "adapter_model.safetensors").unlink()
    with pytest.raises(Untrusted):
        client.pull(NAME, part.parent)
    assert names(part.parent) == PEFT - {"adapter_model.safetensors", "mobizo.json"}
    client.pull(NAME, part.parent)
    assert (part.parent / "adapter_model.safetensors").read_bytes() == data


def test_an_adapter_for_another_base(client, versions, tmp_path):
    own = versions[0]["recipe"]["base"]["sha256"]
    with pytest.raises(BaseMismatch, match=own):
        client.pull(NAME, tmp_path / "a", base_sha256="0" * 64)
    assert not (tmp_path / "a").exists()
    assert client.pull(NAME, tmp_path / "a", base_sha256=own).version == 2


@pytest.mark.parametrize("revision", ["v3", "0", "none", "-1", "../x"])
def test_versions_that_are_not_there(client, tmp_path, revision):
    with pytest.raises(RevisionNotFound):
        client.pull(NAME, tmp_path / "a", revision)
    assert not (tmp_path / "a").exists()


def test_facts_that_another_key_signed(fleet, app, versions, tmp_path):
    pins = Pins.of(fleet.url, public_text(new_private_key().public_key()))
    with Client(fleet.url, app.token, pins=pins) as client, pytest.raises(Untrusted, match="another key"):
        client.pull(NAME, tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Changing(BaseHTTPRequestHandler):
    """Passes questions on, and changes the answers."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        answer = httpx.get(self.server.target + self.path, headers=dict(self.headers))
        content = self.server.change(self.path, answer.content)
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", answer.headers["content-type"])
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def changing(fleet, app, change):
    """A client behind somebody who changes answers, that knows the server's key."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Changing)
    server.target, server.change = fleet.url, change
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with Client(fleet.url, app.token) as honest:
        pins = Pins.of(url, honest.server().public_key)
    with Client(url, app.token, pins=pins) as client:
        yield client
    server.shutdown()
    thread.join()
    server.server_close()


def edited(path_end, old, new):
    def change(path, content):
        assert not path.endswith(path_end) or old in content
        return content.replace(old, new) if path.endswith(path_end) else content

    return change


@pytest.mark.parametrize(
    ("path_end", "old", "new"),
    [
        ("/mobizo.json", b'"tuned_accuracy": 0.75', b'"tuned_accuracy": 0.95'),
        ("/mobizo.json", b'"manifest"', b'"manifests"'),
        ("/mobizo.json", b"{", b"["),
        ("/peft", b'"README.md"', b'"../README.md"'),
        ("/peft", b'"README.md"', b'""'),
        ("/README.md", b"75.0%", b"95.0%"),
    ],
)
def test_answers_that_somebody_changed(fleet, app, versions, tmp_path, path_end, old, new):
    with changing(fleet, app, edited(path_end, old, new)) as client, pytest.raises(Untrusted):
        client.pull(NAME, tmp_path / "a" / "b")
    assert not (tmp_path / "a" / "README.md").exists()
    assert not (tmp_path / "a" / "b" / "mobizo.json").exists()


def test_signed_facts_of_another_version(fleet, app, versions, tmp_path):
    first = app.get(f"/v1/adapters/{NAME}/versions/1/peft/mobizo.json").content
    change = edited("/versions/2/peft/mobizo.json", b"{", b"{")
    with (
        changing(fleet, app, lambda path, content: first if "mobizo.json" in path else change(path, content)) as client,
        pytest.raises(Untrusted, match="v2"),
    ):
        client.pull(NAME, tmp_path / "a")
