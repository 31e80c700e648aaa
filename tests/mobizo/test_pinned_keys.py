"""The key that a client pins: kept at first contact, followed through key rotations, refused otherwise."""

import json

import pytest

from mobizo import PinnedKeys
from server.identity.signing_keys.service import rotate_key
from shared.errors import BadRequest, Untrusted
from shared.signing import key_id, new_private_key, public_text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config" / "servers.json"


def pinned(path):
    return json.loads(path.read_text())


def key(pinned_keys, client):
    """Returns the trusted key for signatures by the server's current key."""
    return public_text(pinned_keys.key(client.base_url, client.server.info().key_id, client.server.keys))


def never():
    raise AssertionError("the server was asked although the key is pinned")


def test_the_first_key_is_pinned_and_not_requested_again(client, path):
    info = client.server.info()
    assert key(PinnedKeys(path), client) == info.public_key
    assert pinned(path) == {client.base_url: info.public_key}
    assert public_text(PinnedKeys(path).key(client.base_url, info.key_id, never)) == info.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["servers.json"]


def test_rotated_keys_are_followed(client, home, path):
    key(PinnedKeys(path), client)
    for _ in range(2):
        rotate_key(home.database, home.settings, compromised=False)
    assert key(PinnedKeys(path), client) == client.server.info().public_key
    assert pinned(path) == {client.base_url: client.server.info().public_key}


def test_a_key_without_a_signed_rotation_is_rejected(client, home, path):
    key(PinnedKeys(path), client)
    before = path.read_bytes()
    rotate_key(home.database, home.settings, compromised=True)
    with pytest.raises(Untrusted, match=r"servers\.json"):
        key(PinnedKeys(path), client)
    assert path.read_bytes() == before


def test_a_key_given_by_the_caller(client):
    other = public_text(new_private_key().public_key())
    with pytest.raises(Untrusted):
        key(PinnedKeys.of(client.base_url + "/", other), client)
    assert key(PinnedKeys.of(client.base_url, client.server.info().public_key), client)


def test_a_signature_by_another_server_is_rejected(client):
    foreign = new_private_key().public_key()
    with pytest.raises(Untrusted, match=key_id(foreign)):
        PinnedKeys().key(client.base_url, key_id(foreign), client.server.keys)


def test_keys_of_other_servers_are_kept(client, path):
    path.parent.mkdir()
    path.write_text('{"https://elsewhere": "x"}')
    pinned_keys = PinnedKeys(path)
    path.write_text('{"https://elsewhere": "y"}')
    key(pinned_keys, client)
    assert pinned(path)["https://elsewhere"] == "y"


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\0"])
def test_invalid_files_are_rejected(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadRequest, match=r"servers\.json"):
        PinnedKeys(path)
