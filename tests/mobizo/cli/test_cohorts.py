"""`mobizo cohort` against a real server: a cohort from a file, its members, a round, and errors."""

import json
from functools import partial

import pytest

from tests.http_server import Handler, http_server
from tests.server.federation.conftest import cohort_request


@pytest.fixture
def call(command):
    return partial(command, "cohort")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "readers.json"
    path.write_text(json.dumps(cohort_request()))
    return path


def test_from_a_file_to_a_round(call, fleet, home, file):
    assert "readers: 0 members, 0 rounds" in call("create", file)
    assert "readers" in call("list")
    alice, bob = fleet.device(name="alice"), fleet.device(name="bob", users=["bob"])
    assert "alice joined readers" in call("join", "readers", "alice", "--device", alice.device_id)
    assert "has 1 members, and a round needs 2" in call("open", "readers", exit_code=1)
    assert json.loads(call("join", "readers", "bob", "--device", bob.device_id, "--json"))["updates"] == 0
    assert bob.device_id in call("members", "readers")
    assert "round 1 open, 0 of 2 updates, from B = 0" in call("open", "readers")
    home.compile()
    assert "waiting" in call("updates", "readers")
    view = json.loads(call("view", "readers", "--json"))
    assert (view["round"]["state"], view["members"]) == ("open", 2)
    assert "fedavg, mean, sgd, weights equal, quorum 2" in call("view", "readers")
    call("leave", "readers", "bob")
    assert "round 1 abandoned" in call("close", "readers")
    assert "abandoned" in call("rounds", "readers")
    assert json.loads(call("rounds", "readers", "--json"))[0]["updates"] == 0
    assert [update["state"] for update in json.loads(call("updates", "readers", "--json"))] == ["left", "missed"]


def test_errors(call, file, tmp_path):
    assert "cohort 'nothing' does not exist" in call("view", "nothing", exit_code=1)
    assert "there is no cohort 'No such'" in call("view", "No such", exit_code=1)
    call("create", file)
    assert "cohort 'readers' already exists" in call("create", file, exit_code=1)
    assert "no device 'device_none' is enrolled here" in call(
        "join", "readers", "alice", "--device", "device_none", exit_code=1
    )
    assert "not a member" in call("leave", "readers", "alice", exit_code=1)
    assert "has no round 1" in call("close", "readers", exit_code=1)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "is not a JSON file" in call("create", broken, exit_code=2)
    broken.write_text(json.dumps(cohort_request(quorum=0)))
    assert "quorum" in call("create", broken, exit_code=2)


class Page(Handler):
    """A web server that is not a mobizo server."""

    def get(self):
        self.answer(200, b"<html>welcome</html>")


def test_wrong_servers_and_tokens(call, device):
    assert "'http://host:port' is not a URL" in call("list", "--server", "http://host:port", exit_code=1)
    assert "copy it again" in call("list", "--token", "two words", exit_code=2)
    assert "copy it again" in call("list", "--token", "t\u00f6ken", exit_code=2)
    assert "token" in call("list", "--token", "mbz_unknown", exit_code=1)
    assert "a device's token may not do that" in call("list", "--token", device.token, exit_code=1)
    with http_server(Page) as other:
        message = call("list", "--server", other.url, exit_code=1)
    assert f"{other.url} does not respond like a mobizo server" in message
