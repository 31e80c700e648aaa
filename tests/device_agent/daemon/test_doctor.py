"""Each check on a device that is right, and on one where just that is wrong."""

import json
import sys
from datetime import datetime, timedelta
from importlib.machinery import PathFinder

import pytest

from device_agent.daemon.doctor import check_daemon, check_engine, check_home, check_rules, check_sensors, check_server
from device_agent.home import AgentHome
from device_agent.policy.sensors import Readings
from shared.errors import Unauthorized
from shared.key_rotation import sign_key_rotation
from shared.rules import Rules
from shared.signing import key_id, new_private_key
from tests.device_agent.commands import run_agent
from tests.device_agent.fake_server import NOW
from tests.device_agent.sensing import SettableSensors


@pytest.fixture
def config(enrolled):
    enrolled.device_key()
    return enrolled.config()


def checks_of(config):
    return {check.name: check for check in check_server(config)}


def test_a_server_that_is_right_and_one_whose_key_handed_over(config, server):
    for _ in range(2):
        checks = checks_of(config)
        assert {name: check.state for name, check in checks.items()} == {"server": "ok", "token": "ok", "clock": "ok"}
        assert key_id(server.key.public_key()) in checks["server"].detail
        former, server.key = server.key, new_private_key()
        server.rotations.append(sign_key_rotation(former, server.key.public_key(), NOW))


def test_a_server_that_revoked_the_device_has_another_key_or_is_away(config, server):
    server.broken["files"] = [Unauthorized("a valid token is needed")]
    check = checks_of(config)["token"]
    assert check.state == "fail"
    assert "enroll again" in check.remedy
    server.key = new_private_key()
    check = checks_of(config)["server"]
    assert check.state == "fail"
    assert config.key_id in check.detail
    (check,) = check_server(config.model_copy(update={"server": "http://127.0.0.1:9"}))
    assert (check.name, check.state) == ("server", "fail")
    assert "cannot be reached" in check.detail


@pytest.mark.parametrize(("hours", "words"), [(-2, "ahead of"), (1, "behind")])
def test_a_clock_that_is_off(config, server, hours, words):
    server.ahead = timedelta(hours=hours)
    check = checks_of(config)["clock"]
    assert check.state == "warn"
    assert words in check.detail
    assert abs(int(check.detail.split()[0]) - abs(hours) * 3600) <= 2


def test_a_home_that_others_may_look_into(home, config):
    assert check_home(home).state == "ok"
    for path, mode, remedy in (
        (home.path, 0o750, "chmod 700"),
        (home.path / "config.json", 0o640, "chmod 600"),
        (home.path / "device.key", 0o604, "chmod 600"),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        check = check_home(home)
        assert check.state == "fail"
        assert remedy in check.remedy
        assert str(path) in check.remedy
        path.chmod(before)
    assert check_home(home).state == "ok"


def test_rules_that_cannot_be_read_or_that_others_may_change(home):
    check, rules = check_rules(home)
    assert (check.state, rules) == ("ok", Rules())
    home.rules.write_text("charging = true\n")
    home.rules.chmod(0o600)
    check, rules = check_rules(home)
    assert (check.state, rules.charging) == ("ok", True)
    assert "charging" in check.detail
    home.rules.chmod(0o620)
    assert check_rules(home)[0].state == "fail"
    home.rules.chmod(0o600)
    home.rules.write_text("chargin = true\n")
    check, rules = check_rules(home)
    assert check.state == "fail"
    assert "'chargin' is not a rule" in check.detail


def sensing(**readings):
    return SettableSensors(Readings(at=datetime.now().astimezone(), **readings))


def test_rules_without_a_sensor_are_named():
    assert check_sensors(Rules(charging=True), sensing(charging=True)).state == "ok"
    check = check_sensors(Rules(charging=True, temperature_ceiling=60), sensing(charging=True))
    assert check.state == "warn"
    assert "temperature_ceiling" in check.detail
    check = check_sensors(Rules(charging=True), sensing(charging=False))
    assert check.state == "warn"
    assert "on battery" in check.detail


def test_an_engine_is_found_without_importing_it(runner_directory, request, monkeypatch):
    check = check_engine()
    assert (check.state, check.detail) == ("ok", f"native runner in {runner_directory}")
    request.getfixturevalue("without_runner")
    check = check_engine()  # the tests' environment has ExecuTorch's Python runtime
    assert check.state == "warn"
    assert check.remedy
    real = PathFinder.find_spec

    def without(name, path=None, target=None):
        return None if name == "executorch" else real(name, path, target)

    # What another test has imported is found without a search.
    monkeypatch.delitem(sys.modules, "executorch", raising=False)
    monkeypatch.setattr(PathFinder, "find_spec", without)
    check = check_engine()
    assert check.state == "fail"
    assert "holds no mobizo-runner" in check.detail


def test_a_daemon_that_runs_or_is_paused(home):
    assert check_daemon(home).state == "warn"
    with home.lock():
        assert check_daemon(home).state == "ok"
        home.paused.touch()
        assert "resume" in check_daemon(home).remedy


def test_the_command_says_all_of_it_and_its_status_says_whether_anything_fails(agent, home, config):
    checks = [json.loads(line) for line in agent("doctor", "--json").stdout.splitlines()]
    names = [check["name"] for check in checks]
    assert names == [
        *("home", "enrolled", "server", "token", "clock", "disk", "memory", "engine"),
        *("rules", "sensors", "service", "daemon"),
    ]
    assert all(check["remedy"] for check in checks if check["state"] != "ok" and check["name"] != "sensors")
    home.path.chmod(0o755)
    process = agent("doctor", status=1)
    assert len(process.stdout.splitlines()) == len(names)
    assert "failed: home" in process.stderr
    assert f"chmod 700 {home.path}" in process.stdout


def test_a_device_that_knows_nothing_yet_is_told_what_to_do(tmp_path):
    process = run_agent(AgentHome(tmp_path / "absent"), "doctor", status=1)
    assert process.stdout.count("mobizo-agent enroll") == 2
    assert "Traceback" not in process.stderr
