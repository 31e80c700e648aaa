"""Downloads of versions: complete, resumed after an interruption, and only with the server's signature."""

import contextlib
import json

import httpx
import numpy as np
import pytest

from mobizo import Client, PinnedKeys
from shared.canonical import file_sha256
from shared.errors import BaseMismatch, RevisionNotFound, Untrusted
from shared.registry import SignedAdapter
from shared.signing import new_private_key, parse_public, public_text, verify_adapter
from shared.zo.lora import load_adapter
from tests.http_server import Handler, http_server

pytestmark = pytest.mark.usefixtures("versions")
NAME = "alice-movies"
PEFT = {"README.md", "adapter_config.json", "adapter_model.safetensors", "mobizo.json"}


@pytest.fixture
def versions(fleet, app, device):
    """Two versions, whose elements of B are all 0.5 and all 0.25."""
    reports = []
    for value in (0.5, 0.25):
        fleet.ready_job(app)
        reports.append(device.finish(device.lease(), value))
    return reports


def names(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(("revision", "number"), [("main", 2), ("v1", 1), ("1", 1), (1, 1), ("v2", 2)])
def test_a_version_is_found_by_each_kind_of_revision(client, versions, tmp_path, revision, number):
    version = client.adapters.download(NAME, tmp_path / "adapter", revision)
    assert (version.version, version.sha256) == (number, versions[number - 1]["sha256"])
    assert names(tmp_path / "adapter") == PEFT
    signed = SignedAdapter.model_validate_json((tmp_path / "adapter" / "mobizo.json").read_bytes())
    manifest = verify_adapter(signed, parse_public(client.server.info().public_key))
    assert (manifest.version, manifest.revision) == (number, version.revision)
    assert client.adapters.manifest(NAME, revision) == manifest


def test_raw_b_is_what_the_device_uploaded(client, versions, tmp_path):
    client.adapters.download(NAME, tmp_path / "a", "v1", "raw")
    assert names(tmp_path / "a") == {"lora_B.safetensors", "mobizo.json"}
    path = tmp_path / "a" / "lora_B.safetensors"
    assert file_sha256(path) == versions[0]["sha256"]
    np.testing.assert_array_equal(load_adapter(path.read_bytes(), versions[0]["size_d"]), np.float32(0.5))


def test_ollama_gets_a_gguf_adapter_and_a_modelfile(client, tmp_path):
    client.adapters.download(NAME, tmp_path / "a", "v1", "ollama")
    assert names(tmp_path / "a") == {"adapter.gguf", "Modelfile", "mobizo.json"}
    assert "FROM ./base.gguf\nADAPTER ./adapter.gguf\n" in (tmp_path / "a" / "Modelfile").read_text()


def test_complete_files_are_not_downloaded_again(client, tmp_path):
    client.adapters.download(NAME, tmp_path / "a")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    config, tensors = tmp_path / "a" / "adapter_config.json", tmp_path / "a" / "adapter_model.safetensors"
    config.write_bytes(b"something else")
    client.adapters.download(NAME, tmp_path / "a")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {config.name, "mobizo.json"}
    assert json.loads(config.read_bytes())["r"] == 2
    client.adapters.download(NAME, tmp_path / "a", "v1")
    assert before[tensors.name] != tensors.stat().st_mtime_ns


def test_interrupted_downloads_resume(client, tmp_path):
    client.adapters.download(NAME, tmp_path / "whole")
    data = (tmp_path / "whole" / "adapter_model.safetensors").read_bytes()
    part = tmp_path / "a" / "adapter_model.safetensors.part"
    part.parent.mkdir()
    part.write_bytes(data[:100])
    reports = []
    client.adapters.download(
        NAME, part.parent, progress=lambda name, received, size: reports.append((name, received, size))
    )
    assert names(part.parent) == PEFT
    assert (part.parent / "adapter_model.safetensors").read_bytes() == data
    assert reports[-1] == ("adapter_model.safetensors", len(data), len(data))
    part.write_bytes(bytes(100))
    (part.parent / "adapter_model.safetensors").unlink()
    with pytest.raises(Untrusted):
        client.adapters.download(NAME, part.parent)
    assert names(part.parent) == PEFT - {"adapter_model.safetensors", "mobizo.json"}
    client.adapters.download(NAME, part.parent)
    assert (part.parent / "adapter_model.safetensors").read_bytes() == data


def test_an_adapter_for_another_base_is_rejected(client, versions, tmp_path):
    base_sha256 = versions[0]["recipe"]["base"]["sha256"]
    with pytest.raises(BaseMismatch, match=base_sha256):
        client.adapters.download(NAME, tmp_path / "a", base_sha256="0" * 64)
    assert not (tmp_path / "a").exists()
    assert client.adapters.download(NAME, tmp_path / "a", base_sha256=base_sha256).version == 2


@pytest.mark.parametrize("revision", ["v3", "0", "none", "-1", "../x"])
def test_unknown_revisions_are_rejected(client, tmp_path, revision):
    with pytest.raises(RevisionNotFound):
        client.adapters.download(NAME, tmp_path / "a", revision)
    assert not (tmp_path / "a").exists()


def test_a_manifest_signed_by_another_key_is_rejected(fleet, app, versions, tmp_path):
    pinned_keys = PinnedKeys.of(fleet.url, public_text(new_private_key().public_key()))
    with (
        Client(fleet.url, app.token, pinned_keys=pinned_keys) as client,
        pytest.raises(Untrusted, match="another key than the pinned one"),
    ):
        client.adapters.download(NAME, tmp_path / "a")
    assert not (tmp_path / "a").exists()


class ChangingProxy(Handler):
    """Forwards GETs, and changes the responses."""

    def get(self):
        response = httpx.get(self.server.target + self.path, headers=dict(self.headers))
        content = self.server.change(self.path, response.content)
        self.answer(response.status_code, content, Content_Type=response.headers["content-type"])


@contextlib.contextmanager
def changing_proxy(fleet, app, change):
    """Yields a client that pins the server's key, behind a proxy that changes responses."""
    with http_server(ChangingProxy, target=fleet.url, change=change) as proxy:
        with Client(fleet.url, app.token) as honest:
            pinned_keys = PinnedKeys.of(proxy.url, honest.server.info().public_key)
        with Client(proxy.url, app.token, pinned_keys=pinned_keys) as client:
            yield client


def edit_response(path_end, old, new):
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
def test_changed_responses_are_rejected(fleet, app, versions, tmp_path, path_end, old, new):
    with changing_proxy(fleet, app, edit_response(path_end, old, new)) as client, pytest.raises(Untrusted):
        client.adapters.download(NAME, tmp_path / "a" / "b")
    assert not (tmp_path / "a" / "README.md").exists()
    assert not (tmp_path / "a" / "b" / "mobizo.json").exists()


def test_the_manifest_of_another_version_is_rejected(fleet, app, versions, tmp_path):
    first = app.get(f"/v1/adapters/{NAME}/versions/1/peft/mobizo.json").content
    change = edit_response("/versions/2/peft/mobizo.json", b"{", b"{")
    with (
        changing_proxy(
            fleet, app, lambda path, content: first if "mobizo.json" in path else change(path, content)
        ) as client,
        pytest.raises(Untrusted, match="v2"),
    ):
        client.adapters.download(NAME, tmp_path / "a")
