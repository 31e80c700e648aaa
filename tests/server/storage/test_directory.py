"""What is particular to a local directory."""

import errno

import pytest

from server.storage import directory as module
from server.storage.directory import DiskArtifacts
from server.storage.store import StorageFull
from shared.canonical import sha256_hex
from shared.errors import Unavailable

DATA = bytes(range(256)) * 500
SHA = sha256_hex(DATA)


@pytest.fixture
def store(tmp_path):
    return DiskArtifacts(tmp_path / "artifacts")


def staging_files(store):
    return list(store._staging.iterdir())


def test_a_file_is_taken_over_without_a_copy(store):
    with store.workspace("w") as workspace:
        path = workspace / "weights.ptd"
        path.write_bytes(DATA)
        inode = path.stat().st_ino
        store.adopt(path, SHA)
    assert store._path(SHA).stat().st_ino == inode
    assert staging_files(store) == []


def test_stored_files_are_read_only(store):
    store.put(DATA)
    assert store._path(SHA).stat().st_mode & 0o222 == 0


def test_a_disk_that_is_full_only_when_synced(store, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(StorageFull):
        store.put(DATA)
    assert list(store.listing()) == []
    assert staging_files(store) == []


def test_a_directory_that_is_gone(store):
    store.check_writable()
    store._staging.rmdir()
    with pytest.raises(Unavailable):
        store.check_writable()
