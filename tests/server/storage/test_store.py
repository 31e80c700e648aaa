"""The contract of every store, over a directory and a real S3 protocol server."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from server.storage.bucket import PART_BYTES
from server.storage.store import Damaged
from shared.errors import NotFound, Untrusted
from tests.server.homes import at_once

DATA = bytes(range(256)) * 5000
SHA = hashlib.sha256(DATA).hexdigest()
LARGE = DATA * (2 * PART_BYTES // len(DATA) + 1)
LARGE_SHA = hashlib.sha256(LARGE).hexdigest()
ABSENT = "0" * 64


def names(store):
    return sorted(file.sha256 for file in store.listing())


def streamed(store, sha256, start, end):
    async def collect():
        return b"".join([piece async for piece in store.stream(sha256, start, end)])

    return asyncio.run(collect())


def adopt(store, data, sha256, name="w"):
    with store.workspace(name) as workspace:
        (workspace / "f").write_bytes(data)
        store.adopt(workspace / "f", sha256)
        assert not (workspace / "f").exists()


@pytest.fixture
def damage(store, request):
    """Changes a byte behind the store's back."""

    def change(sha256, data):
        bad = data[:-1] + bytes([data[-1] ^ 1])
        if hasattr(store, "_objects"):
            path = store._path(sha256)
            path.chmod(0o600)
            path.write_bytes(bad)
        else:
            client, bucket = request.getfixturevalue("s3").client, store.place.bucket
            client.put_object(Bucket=bucket, Key=f"{store.place.prefix}/{store._key(sha256)}", Body=bad)

    return change


@pytest.mark.parametrize("data", [DATA, b""], ids=["some", "empty"])
def test_round_trip(store, data):
    store.check_writable()
    assert names(store) == []
    sha256 = store.put(data)
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert store.read(sha256) == data
    assert store.size(sha256) == len(data)
    assert [(file.sha256, file.size) for file in store.listing()] == [(sha256, len(data))]
    assert streamed(store, sha256, 0, len(data)) == data


def test_the_same_bytes_are_one_file(store):
    assert store.put(DATA) == store.put(DATA)
    adopt(store, DATA, SHA)
    assert names(store) == [SHA]
    assert store.read(SHA) == DATA


def test_a_file_with_another_hash_is_not(store):
    with store.workspace("w") as workspace:
        (workspace / "f").write_bytes(DATA)
        with pytest.raises(Untrusted):
            store.adopt(workspace / "f", ABSENT)
    assert names(store) == []


def test_what_is_absent(store):
    with pytest.raises(NotFound):
        store.read(ABSENT)
    with pytest.raises(NotFound):
        store.size(ABSENT)
    with pytest.raises(NotFound):
        streamed(store, ABSENT, 0, 1)
    assert store.stored_at(ABSENT) is None


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (10, 20), (5, 5), (1, len(DATA)), (len(DATA) - 1, len(DATA)), (0, len(DATA) - 1)]
)
def test_a_piece(store, start, end):
    store.put(DATA)
    assert streamed(store, SHA, start, end) == DATA[start:end]


def test_a_stream_comes_in_bounded_pieces(store):
    store.put(LARGE)

    async def sizes():
        return [len(piece) async for piece in store.stream(LARGE_SHA, 0, len(LARGE))]

    assert max(asyncio.run(sizes())) <= 1 << 20


def test_a_damaged_file_is_not_read_and_never_streamed_whole(store, damage):
    store.put(DATA)
    damage(SHA, DATA)
    with pytest.raises(Damaged, match=SHA):
        store.read(SHA)
    content = bytearray()

    async def collect():
        async for piece in store.stream(SHA, 0, len(DATA)):
            content.extend(piece)

    with pytest.raises(Damaged):
        asyncio.run(collect())
    assert len(content) < len(DATA)


def test_a_file_of_another_size_is_stored_anew(store, damage):
    store.put(DATA)
    damage(SHA, DATA[:-5])
    store.put(DATA)
    assert store.read(SHA) == DATA


@pytest.mark.parametrize("data", [DATA, LARGE], ids=["small", "large"])
def test_many_writers_of_one_file(store, data):
    sha256 = hashlib.sha256(data).hexdigest()
    at_once(
        *(partial(store.put, data) for _ in range(2)),
        *(partial(adopt, store, data, sha256, f"w{number}") for number in range(2)),
    )
    assert names(store) == [sha256]
    assert store.read(sha256) == data


def test_storing_again_makes_young_again(store, grow_old):
    store.put(DATA)
    grow_old(store, SHA)
    old = store.stored_at(SHA)
    assert datetime.now(UTC) - old > timedelta(hours=1)
    store.put(DATA)
    assert store.stored_at(SHA) > old
    assert next(store.listing()).stored_at == store.stored_at(SHA)
    grow_old(store, SHA)
    adopt(store, DATA, SHA)
    assert datetime.now(UTC) - store.stored_at(SHA) < timedelta(minutes=10)


def test_what_is_deleted_is_gone_and_can_come_back(store):
    other = store.put(b"other")
    store.put(DATA)
    store.put(DATA)
    store.delete([SHA, ABSENT])
    store.delete([])
    assert names(store) == [other]
    with pytest.raises(NotFound):
        store.read(SHA)
    store.put(DATA)
    assert store.read(SHA) == DATA


def test_a_workspace_begins_empty_and_ends(store):
    with store.workspace("w") as workspace:
        (workspace / "left").write_bytes(b"x")
    with store.workspace("w") as workspace:
        assert list(workspace.iterdir()) == []
    assert not workspace.exists()


def test_only_abandoned_workspaces_are_removed(store):
    """One that is used stays, however long the database could not be reached and whoever looks."""
    with store.workspace("worker_b") as used:
        abandoned = used.parent / "worker_a-x"
        abandoned.mkdir()
        (abandoned / "half").write_bytes(b"x")
        with store.staging_file() as staged:
            store.remove_abandoned_workspaces()
            assert (used.exists(), abandoned.exists(), staged.path.exists()) == (True, False, True)
        assert list(used.parent.iterdir()) == [used]
