"""Bases from the Hugging Face Hub: the stock client against a small Hub, and what is said when a model is not given."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from server.compiler.checkpoints import hub
from server.compiler.checkpoints.base import locate_base
from shared.errors import UnknownBase

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"not wanted"}
GATED, GONE = (403, "GatedRepo"), (401, "RepoNotFound")


class SmallHub(BaseHTTPRequestHandler):
    """Three routes of the Hub's API: a model at a revision, its files, and one of them."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        refused = {"acme/gated": GATED, "acme/gone": GONE}.get("/".join(self.path.split("/")[-4:-2]))
        if refused is not None:
            return self.answer(refused[0], b"", {"X-Error-Code": refused[1], "X-Error-Message": "no"})
        if self.path.startswith("/api/models/acme/tiny/revision/"):
            siblings = [{"rfilename": name} for name in FILES]
            found = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            return self.answer(200, found, {"Content-Type": "application/json"})
        if self.path.startswith(f"/api/models/acme/tiny/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
            return self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        name = self.path.rpartition("/")[2]
        if self.path.startswith(f"/acme/tiny/resolve/{COMMIT}/") and name in FILES:
            return self.answer(200, FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return self.answer(404, b"", {})

    def answer(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def small_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    server.seen, server.url = [], f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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
    found = locate_base("acme/tiny")
    assert sorted(path.name for path in found.pinned) == ["config.json", "model.safetensors"]
    assert {token for path, token in small_hub.seen if "acme/tiny" in path} == {"Bearer hf_mine"}
    assert not any("pytorch" in path for path, _ in small_hub.seen)


def test_an_endpoint_that_is_a_registry_does_not_get_the_request(small_hub, at, fleet, app, monkeypatch):
    monkeypatch.setattr(hub, "HUB", small_hub.url)
    at(fleet.url, app.token)
    assert locate_base("acme/tiny").root.name == COMMIT
    assert {token for _, token in small_hub.seen} == {None}  # the token is the registry's
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
