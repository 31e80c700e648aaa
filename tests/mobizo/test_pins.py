"""The key that a client pins: kept at first contact, followed when the server hands over, refused otherwise."""

import json

import pytest

from mobizo import Client, Pins
from mobizo.pins import default_path
from server.succession.service import rotate_key
from shared.errors import BadRequest, Untrusted
from shared.signing import key_id, new_private_key, public_text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config" / "servers.json"


@pytest.fixture
def client(fleet, app):
    with Client(fleet.url, app.token) as client:
        yield client


def pinned(path):
    return json.loads(path.read_text())


def key(pins, client):
    """The key that is trusted once the server signs with its present one."""
    return public_text(pins.key(client.address, client.server().key_id, client.keys))


def never():
    raise AssertionError("asked without need")


def test_the_first_key_is_kept_and_not_asked_for_again(client, path):
    info = client.server()
    assert key(Pins(path), client) == info.public_key
    assert pinned(path) == {client.address: info.public_key}
    assert public_text(Pins(path).key(client.address, info.key_id, never)) == info.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["servers.json"]


def test_keys_that_took_over_are_followed(client, home, path):
    key(Pins(path), client)
    for _ in range(2):
        rotate_key(home.database, home.settings, compromised=False)
    assert key(Pins(path), client) == client.server().public_key
    assert pinned(path) == {client.address: client.server().public_key}


def test_a_key_that_nothing_leads_to_is_refused(client, home, path):
    key(Pins(path), client)
    before = path.read_bytes()
    rotate_key(home.database, home.settings, compromised=True)
    with pytest.raises(Untrusted, match=r"servers\.json"):
        key(Pins(path), client)
    assert path.read_bytes() == before


def test_a_key_told_from_elsewhere(client):
    other = public_text(new_private_key().public_key())
    with pytest.raises(Untrusted):
        key(Pins.of(client.address + "/", other), client)
    assert key(Pins.of(client.address, client.server().public_key), client)


def test_what_another_server_signed(client):
    foreign = new_private_key().public_key()
    with pytest.raises(Untrusted, match=key_id(foreign)):
        Pins().key(client.address, key_id(foreign), client.keys)


def test_pins_of_others_stay(client, path):
    path.parent.mkdir()
    path.write_text('{"https://elsewhere": "x"}')
    pins = Pins(path)
    path.write_text('{"https://elsewhere": "y"}')
    key(pins, client)
    assert pinned(path)["https://elsewhere"] == "y"


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\0"])
def test_a_file_that_is_none(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadRequest, match=r"servers\.json"):
        Pins(path)


def test_where_pins_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "mobizo" / "servers.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".config" / "mobizo" / "servers.json"
