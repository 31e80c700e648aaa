"""Files addressed by content: whole or absent, checked, shared."""

import asyncio
import errno
import threading

import pytest

from server.artifacts import store as module
from server.artifacts.store import ArtifactStore
from shared.canonical import sha256_hex
from shared.errors import NotFound, Unavailable, Untrusted

DATA = bytes(range(256)) * 500


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "artifacts")


def files(store):
    return sorted(path.name for path in store._root.rglob("*") if path.is_file())


def staged(store):
    return list(store._staging.iterdir())


def test_round_trip(store):
    digest = store.put(DATA)
    assert digest == sha256_hex(DATA)
    assert store.read(digest) == DATA
    assert store.size(digest) == len(DATA)
    assert staged(store) == []


def test_the_same_bytes_are_one_file(store):
    assert store.put(DATA) == store.put(DATA)
    assert files(store) == [sha256_hex(DATA)]


def test_nothing_and_empty(store):
    digest = store.put(b"")
    assert store.read(digest) == b""
    assert store.size(digest) == 0


def test_what_is_absent(store):
    with pytest.raises(NotFound):
        store.read("0" * 64)
    with pytest.raises(NotFound):
        store.size("0" * 64)


def test_a_piece(store):
    digest = store.put(DATA)

    async def read(start, end):
        return b"".join([piece async for piece in store.stream(digest, start, end)])

    for start, end in ((0, len(DATA)), (10, 20), (len(DATA) - 1, len(DATA)), (5, 5)):
        assert asyncio.run(read(start, end)) == DATA[start:end]


def test_a_file_is_taken_over_without_a_copy(store):
    with store.workspace("w") as workspace:
        path = workspace / "weights.ptd"
        path.write_bytes(DATA)
        inode = path.stat().st_ino
        store.adopt(path, sha256_hex(DATA))
        assert not path.exists()
    stored = next(path for path in store._root.rglob("*") if path.is_file())
    assert stored.stat().st_ino == inode
    assert staged(store) == []


def test_a_file_with_another_hash_is_not(store):
    with store.workspace("w") as workspace:
        (workspace / "f").write_bytes(DATA)
        with pytest.raises(Untrusted):
            store.adopt(workspace / "f", "0" * 64)
    assert files(store) == []


def test_damage_on_disk_is_noticed(store):
    digest = store.put(DATA)
    stored = next(path for path in store._root.rglob("*") if path.is_file())
    stored.chmod(0o600)
    stored.write_bytes(DATA[:-1] + b"!")
    with pytest.raises(Unavailable, match="damaged"):
        store.read(digest)


def test_a_full_disk_leaves_nothing(store, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(Unavailable, match="full"):
        store.put(DATA)
    assert files(store) == []
    assert staged(store) == []


def test_many_writers_of_one_file(store):
    def write():
        for _ in range(20):
            store.put(DATA)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(store) == [sha256_hex(DATA)]
    assert staged(store) == []


def test_a_workspace_begins_empty_and_ends(store):
    with store.workspace("w") as workspace:
        (workspace / "left").write_bytes(b"x")
    with store.workspace("w") as workspace:
        assert list(workspace.iterdir()) == []
    assert staged(store) == []


def test_what_a_killed_process_left_can_be_removed(store):
    (store._staging / "worker_a").mkdir()
    (store._staging / "worker_b").mkdir()
    (store._staging / "worker_a" / "weights.ptd").write_bytes(b"x")
    (store._staging / "tmpfile").write_bytes(b"an upload under way")
    assert store.workspaces() == ["worker_a", "worker_b"]
    store.remove_workspace("worker_a")
    store.remove_workspace("nothing")
    assert store.workspaces() == ["worker_b"]


def test_stored_files_are_read_only(store):
    store.put(DATA)
    stored = next(path for path in store._root.rglob("*") if path.is_file())
    assert stored.stat().st_mode & 0o222 == 0


def test_a_directory_that_is_gone(store):
    store.check_writable()
    store._staging.rmdir()
    with pytest.raises(Unavailable):
        store.check_writable()
