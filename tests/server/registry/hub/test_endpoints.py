"""What the Hub's API answers, word for word: refusals, headers, pages, and addresses that lead nowhere."""

import http.client
import json
import re
from urllib.parse import quote, urlsplit

import pytest
from sqlalchemy import delete, select

from server.identity.tenants import TenantService
from server.registry.models import StoredPeftFile, StoredVersion
from shared.access import Scope
from tests.server.identity.rules import found_routes

MOVIES = "/api/models/default/alice-movies"
MAIN = f"{MOVIES}/revision/main"
FILES = "/default/alice-movies/resolve"
DEVIOUS = (
    *("../README.md", "../../../../etc/passwd", "x/../README.md", "./README.md", "/README.md", "%2e%2e/README.md"),
    *("..%2fREADME.md", "..%2F..%2F..%2Fmobizo.sqlite3", "%2Fetc%2Fpasswd", "..%5c..%5cmobizo.sqlite3"),
    *("%252e%252e%252fREADME.md", "README.md%2f"),
)


@pytest.fixture
def published_version(device, lease):
    """A version of the movies' adapter."""
    return device.finish(lease)


def select_version(version):
    return select(StoredVersion).where(StoredVersion.revision == version["revision"])


def test_a_file_and_what_is_told_of_it(app, published_version):
    for revision, cached in (("main", "no-cache"), ("v1", "no-cache"), (published_version["revision"], "immutable")):
        path = f"{FILES}/{revision}/lora_B.safetensors"
        head, whole = app.head(path), app.get(path, headers={"Accept-Encoding": "gzip, br"})
        assert whole.status_code == head.status_code == 200
        for answer in (head, whole):
            assert answer.headers["x-repo-commit"] == published_version["revision"]
            assert re.fullmatch("[0-9a-f]{40}", answer.headers["x-repo-commit"])
            assert answer.headers["etag"] == answer.headers["x-linked-etag"] == f'"{published_version["sha256"]}"'
            assert answer.headers["content-length"] == answer.headers["x-linked-size"] == str(published_version["size"])
            assert "content-encoding" not in answer.headers
            assert not [name for name in answer.headers if name.startswith("x-xet")]
            assert {cached, "private", "no-transform"} <= set(answer.headers["cache-control"].split(", "))
        part = app.get(path, headers={"Range": "bytes=8-", "If-Range": head.headers["etag"]})
        assert (part.status_code, part.content) == (206, whole.content[8:])
        assert app.get(path, headers={"If-None-Match": head.headers["etag"]}).status_code == 304


def test_a_form_that_the_base_cannot_have(home, app, published_version):
    assert app.head(f"{FILES}/main/adapter.gguf").status_code == 200
    with home.database.writing() as session:
        version = session.scalars(select_version(published_version)).one()
        version.shape = version.shape.model_copy(update={"architecture": "opt"})
        session.execute(delete(StoredPeftFile).where(StoredPeftFile.path == "adapter.gguf"))
    answer = app.head(f"{FILES}/main/adapter.gguf")
    assert (answer.status_code, answer.headers["x-error-code"]) == (404, "EntryNotFound")
    assert "'opt'" in answer.headers["x-error-message"]


def test_no_path_leads_out(app, fleet, published_version, problem):
    # As it stands: other clients make it shorter before they send it.
    place = urlsplit(fleet.url)
    link = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    for path in DEVIOUS:
        link.request("GET", f"{FILES}/main/{path}", headers={"Authorization": f"Bearer {app.token}"})
        answer = link.getresponse()
        assert (answer.status, answer.headers["x-error-code"]) == (404, "EntryNotFound"), path
        assert json.loads(answer.read())["code"] == "file-not-in-adapter", path
    link.close()
    problem(app.get(f"{FILES}/main/README.md%00"), 400, "bad-request")
    assert app.get("/default%2falice-movies/resolve/main/README.md").headers["x-error-code"] == "EntryNotFound"
    assert app.get(f"{FILES}/refs%2Fheads%2Fmain/README.md").headers["x-error-code"] == "RevisionNotFound"


def test_strangers_see_what_those_see_who_ask_for_nothing(fleet, published_version):
    stranger, anyone = fleet.app("other"), fleet.actor()
    for path in (f"{MOVIES}/revision/v1", f"{MOVIES}/tree/main", f"{FILES}/main/README.md"):
        look_alike(stranger, anyone, path)


def look_alike(stranger, anyone, path):
    """Whatever is asked for: what is there is answered as what is not."""
    for adapter_name, instead in (("alice-movies", "nothing"), ("default/alice-movies", "nobody/x")):
        response, nothing = stranger.get(path), stranger.get(path.replace(adapter_name, instead))
        assert (response.status_code, response.headers["x-error-code"]) == (404, "RepoNotFound")
        expected_headers = {
            name: value
            for name, value in response.headers.items()
            if name not in ("x-request-id", "date", "content-length")
        }
        headers = {name: nothing.headers.get(name) for name in expected_headers}
        assert {name: value.replace("default/alice-movies", "?") for name, value in expected_headers.items()} == {
            name: value.replace("default/nothing", "?").replace("nobody/x", "?") for name, value in headers.items()
        }
    response, nothing = anyone.get(path), anyone.get(path.replace("alice-movies", "nothing"))
    for answer in (response, nothing):
        assert (answer.status_code, answer.headers["x-error-code"]) == (401, "RepoNotFound")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_who_is_refused_is_told_why(fleet, home, published_version, problem):
    bad = fleet.actor("mobizo-app-" + "A" * 43).get(MAIN)
    problem(bad, 401, "unauthorized")
    assert bad.headers["x-error-message"] == "Invalid credentials in Authorization header"
    assert "x-error-code" not in bad.headers
    lacking = fleet.actor(home.token("app", scopes=[Scope.JOBS_READ])).get(MAIN)
    problem(lacking, 403, "forbidden")
    assert lacking.headers["x-error-message"] == "the token lacks: adapters:read"
    assert "x-error-code" not in lacking.headers
    shut = fleet.app("shut")
    with home.database.writing() as session:
        TenantService(session).suspend("shut")
    refusal = shut.get("/api/models/shut/x/revision/main")
    problem(refusal, 403, "tenant-suspended")
    assert refusal.headers["x-error-message"] == "Access to this resource is disabled."


def test_any_name_may_be_asked_for(app, published_version):
    for name in ("\u00fc" * 1000, "a\u2028b", "%", "x" * 20_000):
        answer = app.get(f"/api/models/default/{quote(name)}/revision/main")
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RepoNotFound")
        assert len(answer.headers["x-error-message"]) <= 500
    long = app.get(f"{MOVIES}/revision/{'x' * 20_000}")
    assert (long.status_code, long.headers["x-error-code"]) == (404, "RevisionNotFound")


def test_it_comes_after_all_other_routes(standing, fleet, app, device):
    routes = [route for route in found_routes(standing[0]) if route.path != "ANY"]
    positions = [at for at, route in enumerate(routes) if route.path.startswith("/{")]
    assert positions == list(range(len(routes) - len(positions), len(routes)))
    fleet.ready_job(app, adapter="resolve")
    version = device.finish(device.lease())
    assert app.get("/v1/adapters/resolve/versions/1").json() == version
    assert app.get("/default/resolve/resolve/main/README.md").status_code == 200
