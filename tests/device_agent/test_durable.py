"""Durable writes: whole files and no leftovers."""

import os

import pytest

from device_agent.durable import LEFTOVER_SECONDS, remove_leftovers
from shared.durable import write_durably, write_pieces


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


def test_temporary_files_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    old, recent = tmp_path / "runs" / ".run.json.abc.new", tmp_path / ".status.json.def.new"
    old.parent.mkdir()
    for path in (old, recent):
        path.touch()
    os.utime(old, (old.stat().st_mtime - LEFTOVER_SECONDS - 1,) * 2)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".status.json.def.new", "runs"]
    assert names(old.parent) == []
