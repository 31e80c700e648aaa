"""An agent's home."""

import signal
import stat
import subprocess
import sys

import pytest

from device_agent.errors import NotEnrolled
from device_agent.home import AgentHome
from shared.errors import BadRequest, MobizoError
from shared.signing import public_text
from tests.device_agent.homes import enroll


def test_identity_is_kept_and_private(home, server_key):
    with pytest.raises(NotEnrolled, match="mobizo-agent enroll"):
        home.config()
    enroll(home, "http://server", server_key)
    assert home.config().public_key == public_text(server_key.public_key())
    key = home.device_key()
    assert public_text(home.device_key().public_key()) == public_text(key.public_key())
    for name in ("config.json", "device.key"):
        assert stat.S_IMODE((home.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    first = home.noise_key()  # of the noise on counts
    assert first == home.noise_key()
    (home.path / "device.key").unlink()
    assert home.noise_key() != first


SLEEPER = "import sys, time; file = open(sys.argv[1]) if sys.argv[2:] else None; print(flush=True); time.sleep(600)"


@pytest.fixture
def sleeper(home):
    """Starts a process that sleeps, with the home's lock file open or not, and returns it."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-c", SLEEPER, str(home.path / "lock"), *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        processes[-1].stdout.readline()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_only_the_process_that_holds_the_lock_is_stopped(home, sleeper):
    with pytest.raises(MobizoError, match="mobizo-agent run"):
        home.stop_daemon()
    with home.lock():
        stranger, daemon = sleeper(), sleeper("with the lock")
        # What a daemon that crashed left, before the next one has written its own number.
        (home.path / "lock").write_text(str(stranger.pid))
        with pytest.raises(MobizoError, match="cannot be found from here"):
            home.stop_daemon()
        assert stranger.poll() is None
        (home.path / "lock").write_text(str(daemon.pid))
        home.stop_daemon()
        assert daemon.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("name", ["", "../elsewhere", "a/b", "/etc", ".", ".."])
def test_a_job_id_is_no_path(home, name):
    with pytest.raises(BadRequest, match="not a plain name"):
        home.run(name)


def test_a_home_that_is_damaged_or_cannot_be_made(home, tmp_path):
    (home.path / "config.json").write_text("{")
    with pytest.raises(BadRequest, match=r"config\.json cannot be read; enroll"):
        home.config()
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="--home"):
        AgentHome(tmp_path / "file" / "home").create()
