"""Durable writes: whole files and no leftovers."""

import pytest

from shared.durable import new_file, write_durably, write_pieces


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_write_replaces_the_file_and_keeps_secrets_private(tmp_path):
    path = tmp_path / "secret"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["secret"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_durably(path, b"old")

    def pieces():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_pieces(path, pieces())
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_new_file_replaces_none(tmp_path):
    with new_file(tmp_path / "key") as file:
        file.write(b"one")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError), new_file(tmp_path / "key"):
        pass
    assert (tmp_path / "key").read_bytes() == b"one"
