"""The wrapper, by the real adb and a real adbd."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from device_agent.android.adb import (
    Adb,
    AdbMissing,
    PhoneFull,
    PhoneRefused,
    PhoneUnreachable,
    PhoneUnsuitable,
)
from device_agent.errors import Stopped

FALSE_ADBD = Path(__file__).with_name("false_adbd.py")
BYTES = bytes(range(256)) * 4096 + b"\r\n\x00end without a newline"


@contextmanager
def false_phone(phone, kind):
    """The serial of a device that Debian's adbd cannot be; see false_adbd.py."""
    port = phone.port + 1
    command = [*phone.inside, sys.executable, "-I", FALSE_ADBD, str(port), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield f"127.0.0.1:{port}"
            phone.client("disconnect", f"127.0.0.1:{port}")
        finally:
            process.kill()


@pytest.mark.parametrize("status", [0, 255])
def test_a_script_tells_its_status_and_both_outputs(adb, status):
    result = adb.shell(f"echo out; echo err >&2; exit {status}")
    assert (result.status, result.out, result.err) == (status, b"out\n", "err\n")


def test_output_is_bytes(adb, phone):
    phone.path("/data/file").write_bytes(BYTES)
    assert adb.shell("cat /data/file").out == BYTES


def test_a_pushed_file_is_complete(adb, phone, tmp_path):
    (tmp_path / "here").write_bytes(BYTES)
    adb.push(tmp_path / "here", "/data/there")
    assert phone.path("/data/there").read_bytes() == BYTES


def test_what_the_phone_refuses_to_copy(adb, tmp_path):
    (tmp_path / "here").write_bytes(BYTES)
    with pytest.raises(PhoneRefused, match="Read-only file system"):
        adb.push(tmp_path / "here", "/usr/there")


def test_no_room(adb, tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(PhoneFull, match="free some storage"):
        adb.push(tmp_path / "large", "/data/large")
    with pytest.raises(PhoneFull, match="free some storage"):
        adb.run("head -c 200000000 /dev/zero > /data/large")


def test_adb_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AdbMissing, match="apt install adb"):
        Adb().devices()
    with pytest.raises(AdbMissing, match="adb is not at"):
        Adb(None, tmp_path / "adb").devices()


def test_no_phone(phone):
    phone.client("disconnect")
    with pytest.raises(PhoneUnreachable, match="connect one with USB debugging enabled"):
        Adb(None, phone.adb).device()
    with pytest.raises(PhoneUnreachable, match=r"not see phone pixel \(connected: none\)"):
        Adb("pixel", phone.adb).device()


def test_two_phones_and_no_serial(phone):
    phone.start(phone.port + 1)
    with pytest.raises(PhoneUnreachable, match=r"2 phones .*select one with --adb SERIAL"):
        Adb(None, phone.adb).device()
    assert Adb(phone.serial, phone.adb).device() == phone.serial


def test_a_phone_that_does_not_trust_this_machine(phone):
    phone.client("disconnect")
    with false_phone(phone, "distrustful") as serial:
        for requested_serial in (serial, None):
            with pytest.raises(PhoneUnreachable, match="accept the USB debugging prompt") as error:
                Adb(requested_serial, phone.adb).device()
            assert "\n" not in error.value.detail


def test_a_phone_whose_shell_is_no_binary_stream(phone):
    with false_phone(phone, "old") as serial, pytest.raises(PhoneUnsuitable, match="use Android 7 or later"):
        Adb(serial, phone.adb).run("echo a")


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


def test_a_link_that_breaks_is_no_exit_status(adb, phone):
    adb.device()
    phone.kill()
    with pytest.raises(PhoneUnreachable):
        adb.shell("exit 0")
    phone.start(connected=False)
    phone.connect()
    assert adb.shell("exit 4").status == 4


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
