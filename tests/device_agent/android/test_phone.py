"""What is kept on a phone, by the real adb and a real adbd."""

import hashlib
import os
import time

import pytest

from device_agent.android.phone import Phone
from device_agent.errors import DoesNotFit
from shared.errors import Untrusted

THERE = "/data/local/tmp/mobizo"
DAY = 24 * 3600


@pytest.fixture
def device(adb, phone):
    phone.empty()
    device = Phone(adb)
    device.open()
    yield device
    phone.empty()


def write_file(path, data):
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def age(path, days):
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_a_file_is_pushed_once(device, phone, tmp_path):
    local, sha256 = write_file(tmp_path / "weights", os.urandom(100_000))
    assert device.keep(local, sha256) == device.keep(local, sha256) == f"{THERE}/files/{sha256}"
    assert device.pushed_bytes == 100_000
    assert phone.path(device.file(sha256)).read_bytes() == local.read_bytes()
    # A file that a full or crashed phone cut short is pushed again.
    with phone.path(device.file(sha256)).open("r+b") as file:
        file.truncate(5)
    device.keep(local, sha256)
    assert phone.path(device.file(sha256)).read_bytes() == local.read_bytes()


def test_a_file_of_other_content_is_not_taken(device, phone, tmp_path):
    local, _ = write_file(tmp_path / "weights", b"changed since")
    with pytest.raises(Untrusted, match="has changed"):
        device.keep(local, "0" * 64)
    assert phone.run(f"ls {THERE}/files") == ""


def test_no_room_is_said_with_numbers_before_anything_is_pushed(device, phone, tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(DoesNotFit, match=r"has 12\d MB free and 216 MB are needed"):
        device.keep(tmp_path / "large", "0" * 64)
    assert device.pushed_bytes == 0


def test_clean_removes_the_least_recently_used_files(device, phone, tmp_path):
    hashes = []
    for index, days in enumerate((5, 4, 3, 2)):
        local, sha256 = write_file(tmp_path / str(index), os.urandom(1 << 20))
        age(phone.path(device.keep(local, sha256)), days)
        hashes.append(sha256)
    device.clean(keep={hashes[0]}, max_bytes=2 << 20)
    # The oldest is kept as asked, then the newest ones as far as there is room.
    assert set(phone.run(f"ls {THERE}/files").split()) == {hashes[0], hashes[2], hashes[3]}
    device.clean(max_bytes=0)
    assert phone.run(f"ls {THERE}/files") == ""


def test_packed_weights_count_as_used_with_their_weights(device, phone, tmp_path):
    local, sha256 = write_file(tmp_path / "weights", os.urandom(1 << 20))
    packed = phone.path(f"{device.keep(local, sha256)}.packed")
    packed.write_bytes(os.urandom(1 << 20))
    age(packed, 9)
    age(phone.path(device.keep(*write_file(tmp_path / "other", os.urandom(1 << 20)))), 5)
    modified = packed.stat().st_mtime_ns
    device.keep(local, sha256)
    assert packed.stat().st_mtime_ns == modified
    device.clean(max_bytes=2 << 20)
    assert set(phone.run(f"ls {THERE}/files").split()) == {sha256, packed.name}
