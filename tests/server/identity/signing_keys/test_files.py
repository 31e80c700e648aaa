"""The signing key on disk."""

import pytest

from server.identity.signing_keys.service import create_key, load_key
from shared.errors import Unavailable
from shared.signing import private_bytes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys" / "manifest.ed25519"


def test_round_trip_and_mode(path):
    key = create_key(path)
    assert private_bytes(load_key(path)) == private_bytes(key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_is_never_replaced(path):
    key = create_key(path)
    with pytest.raises(FileExistsError):
        create_key(path)
    assert private_bytes(load_key(path)) == private_bytes(key)


def test_absent(path):
    with pytest.raises(Unavailable, match="init"):
        load_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_can_read(path, mode):
    create_key(path)
    path.chmod(mode)
    with pytest.raises(Unavailable, match="chmod 600"):
        load_key(path)


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_key(path, data):
    create_key(path)
    path.write_bytes(data)
    with pytest.raises(Unavailable, match="damaged"):
        load_key(path)
