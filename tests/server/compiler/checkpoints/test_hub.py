"""Bases from the Hugging Face Hub: the stock client against a small Hub, and what is said when a model is not given."""

import json
import socket
import struct

import huggingface_hub
import pytest

from server.compiler.checkpoints import hub
from server.compiler.checkpoints.base import locate_base
from shared.errors import UnknownBase
from tests.http_server import Handler, http_server
from tests.server.cli.conftest import call
from tests.server.llama import write_llama

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"not wanted"}
GATED, NOT_FOUND = (403, "GatedRepo"), (401, "RepoNotFound")


class SmallHub(Handler):
    """Three routes of the Hub's API: a model at a revision, its files, and one of them."""

    def get(self):
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        refusal = {"acme/gated": GATED, "acme/gone": NOT_FOUND}.get("/".join(self.path.split("/")[-4:-2]))
        if refusal is not None:
            return self.answer(refusal[0], X_Error_Code=refusal[1], X_Error_Message="no")
        if self.path.startswith("/api/models/acme/tiny/revision/"):
            siblings = [{"rfilename": name} for name in self.server.files]
            info = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            return self.answer(200, info, Content_Type="application/json")
        if self.path.startswith(f"/api/models/acme/tiny/tree/{COMMIT}"):
            files = self.server.files.items()
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files]
            return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        name = self.path.rpartition("/")[2]
        if self.path.startswith(f"/acme/tiny/resolve/{COMMIT}/") and name in self.server.files:
            return self.file(name, self.server.files[name])
        return self.answer(404)

    def file(self, name, content):
        headers = {"ETag": f'"{name}"', "X_Repo_Commit": COMMIT}
        if requested_range := self.headers.get("Range"):
            self.server.resumed.append((name, requested_range))
            first = int(requested_range.removeprefix("bytes=").partition("-")[0])
            headers["Content_Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self.answer(206, content[first:], **headers)
        breaks = self.server.breaks.get(name) if self.command == "GET" else None
        if breaks is not None:
            self.server.breaks.pop(name)
            self.answer(200, content[: len(content) // 2], Content_Length=len(content), **headers)
            if breaks == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                socket.close(self.connection.detach())
            self.close_connection = True
            return None
        return self.answer(200, content, **headers)


@pytest.fixture
def small_hub():
    with http_server(SmallHub, files=FILES, breaks={}, resumed=[], requests=[]) as server:
        yield server


@pytest.fixture
def at(monkeypatch, tmp_path):
    """Sets what HF_ENDPOINT, HF_TOKEN and HF_HUB_CACHE set before the client is imported."""

    def at(endpoint, token):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)

    return at


def test_a_base_is_downloaded_from_the_hub_or_a_mirror(small_hub, at):
    at(small_hub.url, "hf_mine")
    files = locate_base("acme/tiny")
    assert sorted(path.name for path in files.pinned) == ["config.json", "model.safetensors"]
    assert {token for path, token in small_hub.requests if "acme/tiny" in path} == {"Bearer hf_mine"}
    assert not any("pytorch" in path for path, _ in small_hub.requests)


def test_a_model_of_the_hub_becomes_a_base_with_its_id_over_a_link_that_breaks(
    small_hub, at, home, tmp_path, monkeypatch
):
    for name, value in home.settings.environment().items():
        monkeypatch.setenv(name, value)
    write_llama(tmp_path / "llama")
    small_hub.files = {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()}
    at(small_hub.url, None)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # half of the file is 9,864 bytes
    small_hub.breaks = {"model.safetensors": "reset"}
    with pytest.raises(UnknownBase, match=f"download of acme/tiny from {small_hub.url} broke off .* repeat the"):
        call("base", "add", "llama", "acme/tiny")
    small_hub.breaks = {"model.safetensors": "closed"}
    added = json.loads(call("base", "add", "llama", "acme/tiny", "--json"))
    assert small_hub.resumed == [("model.safetensors", "bytes=8192-")]
    local = json.loads(call("base", "add", "local", tmp_path / "llama", "--json"))
    assert (added["hub_id"], added["source"], local["hub_id"]) == ("acme/tiny", "acme/tiny", None)
    assert (added["sha256"], added["parameters"]) == (local["sha256"], local["parameters"])


def test_an_endpoint_that_is_a_registry_does_not_get_the_request(small_hub, at, fleet, app, monkeypatch):
    monkeypatch.setattr(hub, "HUB", small_hub.url)
    at(fleet.url, app.token)
    assert locate_base("acme/tiny").root.name == COMMIT
    assert {token for _, token in small_hub.requests} == {None}  # the token is the registry's
    with pytest.raises(UnknownBase, match=r"acme/gated is gated: .* unset HF_ENDPOINT"):
        locate_base("acme/gated")


@pytest.mark.parametrize(
    ("token", "remedy"), [(None, "set HF_TOKEN to a token"), ("hf_mine", "give the account of your token access")]
)
def test_a_gated_or_private_model_says_what_to_do(small_hub, at, token, remedy):
    at(small_hub.url, token)
    page = f"{small_hub.url}/acme/gated"
    with pytest.raises(UnknownBase, match=f"acme/gated is gated: accept its conditions at {page}, {remedy}"):
        locate_base("acme/gated")
    with pytest.raises(UnknownBase, match=f"has no model acme/gone, or it is private; check the id, or {remedy}"):
        locate_base("acme/gone")
