"""An agent's home."""

import stat
from pathlib import Path

import pytest

from device_agent.errors import AlreadyRunning, NotEnrolled
from device_agent.home import AgentHome
from shared.errors import BadRequest
from shared.signing import new_private_key, public_text
from tests.device_agent.conftest import enroll


def test_the_home_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("MOBIZO_AGENT_HOME", raising=False)
    assert AgentHome.locate().path.name == "mobizo-agent"
    monkeypatch.setenv("MOBIZO_AGENT_HOME", str(tmp_path))
    assert AgentHome.locate().path == tmp_path
    assert AgentHome.locate(Path("given")).path == Path("given")


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


def test_the_key_of_noise_on_counts_is_of_the_devices_key(home):
    first = home.noise_key()
    assert first == home.noise_key()
    home.store_device_key(new_private_key())
    assert home.noise_key() != first


def test_a_damaged_configuration_is_named(home):
    (home.path / "config.json").write_text("{")
    with pytest.raises(BadRequest, match=r"config\.json cannot be read; enroll"):
        home.config()


def test_one_daemon_at_a_time(home):
    assert not home.running()
    with home.lock():
        assert home.running()
        with pytest.raises(AlreadyRunning), home.lock():
            pass
    assert not home.running()


@pytest.mark.parametrize("name", ["", "../elsewhere", "a/b", "/etc", ".", ".."])
def test_a_job_id_is_no_path(home, name):
    with pytest.raises(BadRequest, match="not a plain name"):
        home.run(name)


def test_a_home_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="--home"):
        AgentHome(tmp_path / "file" / "home").create()
