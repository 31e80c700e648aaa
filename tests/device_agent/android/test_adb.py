"""The wrapper, by the real adb and a real adbd."""

import pytest

from device_agent.android.adb import Adb, PhoneUnreachable, PhoneUnsuitable
from device_agent.errors import DoesNotFit, RuntimeFailed, Stopped
from shared.errors import Unavailable

BYTES = bytes(range(256)) * 4096 + b"\r\n\x00end without a newline"


@pytest.mark.parametrize("status", [0, 255])
def test_a_script_tells_its_status_and_both_outputs(adb, status):
    result = adb.shell(f"echo out; echo err >&2; exit {status}")
    assert (result.returncode, result.stdout, result.stderr) == (status, b"out\n", b"err\n")


def test_output_is_bytes_and_a_pushed_file_is_complete_or_refused(adb, phone, tmp_path):
    (tmp_path / "here").write_bytes(BYTES)
    adb.push(tmp_path / "here", "/data/there")
    assert phone.path("/data/there").read_bytes() == adb.shell("cat /data/there").stdout == BYTES
    with pytest.raises(RuntimeFailed, match="Read-only file system"):
        adb.push(tmp_path / "here", "/usr/there")


def test_no_room(adb, tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(DoesNotFit, match="free some storage"):
        adb.push(tmp_path / "large", "/data/large")
    with pytest.raises(DoesNotFit, match="free some storage"):
        adb.run("head -c 200000000 /dev/zero > /data/large")


def test_adb_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ANDROID_HOME", raising=False)
    with pytest.raises(Unavailable, match="apt install adb"):
        Adb().devices()
    with pytest.raises(Unavailable, match="adb is not at"):
        Adb(None, tmp_path / "adb").devices()


def test_no_phone(phone):
    phone.client("disconnect")
    with pytest.raises(PhoneUnreachable, match="connect one with USB debugging enabled"):
        Adb(None, phone.adb).device()
    with pytest.raises(PhoneUnreachable, match=r"not see phone pixel \(connected: none\)"):
        Adb("pixel", phone.adb).device()


def test_a_phone_that_is_offline(phone):
    phone.kill()
    while "offline" not in phone.client("devices"):
        pass
    with pytest.raises(PhoneUnreachable, match="reconnect its cable") as error:
        Adb(None, phone.adb).device()
    assert "\n" not in error.value.detail


def test_a_network_phone_that_the_server_forgot_is_connected_again(adb, phone):
    assert adb.run("echo a") == "a\n"
    phone.client("kill-server")
    with pytest.raises(PhoneUnreachable):
        adb.run("echo b")
    assert adb.run("echo c") == "c\n"


def test_a_phone_that_says_nothing(adb, phone):
    adb.device()
    phone.run("kill -STOP $(pidof adbd)")
    with pytest.raises(PhoneUnreachable, match="did not respond"):
        adb.shell("true", seconds=0.5)
    phone.run("kill -CONT $(pidof adbd)")


def test_stop_interrupts_a_long_call(adb):
    adb.device()
    adb.stop = lambda: True
    with pytest.raises(Stopped):
        adb.shell("sleep 60")


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("unauthorized", PhoneUnreachable, "pixel: the phone does not trust .*accept the USB debugging prompt"),
        ("recovery", PhoneUnreachable, "pixel is in state 'recovery'; start Android on it"),
        ("device", PhoneUnsuitable, "pixel: its adb shell has no binary-safe streams; use Android 7 or later"),
    ],
)
def test_states_that_debians_adbd_does_not_have(tmp_path, state, error, words):
    """In the words of adb: an Android that does not trust this machine, one that has not started, and an old one."""
    script = tmp_path / "adb"
    old = "error: device only supports allocating a pty"
    script.write_text(
        f"#!/bin/sh\n[ $1 = devices ] && printf 'pixel\\t{state}\\n' || {{ echo '{old}' >&2; exit 1; }}\n"
    )
    script.chmod(0o755)
    with pytest.raises(error, match=words):
        Adb(None, script).run("echo a")
