"""The systemd unit: systemd's own verdict on it, and each word back as it was given."""

import configparser
import os
import shutil
import subprocess
import sys

import pytest

from device_agent.daemon.service import UNIT, Service, installed_units
from shared.errors import BadRequest
from tests.device_agent.homes import enroll

COMMAND = [sys.executable, "-m", "device_agent", "run", "--data", "movies=/data/movies"]

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def parse(text):
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    parser.optionxform = str
    parser.read_string(text)
    return parser


@pytest.fixture
def analyze(tmp_path):
    """What systemd says of a unit: (exit status, words)."""

    def analyze(service, *arguments):
        (tmp_path / UNIT).write_text(service.text())
        command, env = ["systemd-analyze", *arguments, tmp_path / UNIT], os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return process.returncode, process.stdout + process.stderr

    return analyze


@needs_systemd
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("home", ["/var/lib/mobizo", '/srv/a "b" 100% $HOME \\x/mobizo agent'])
def test_systemd_takes_the_unit_and_says_nothing(analyze, own, home, tmp_path):
    service = Service(COMMAND, tmp_path / home.strip("/"), "root", own)
    assert analyze(service, "verify", "--man=no", *(["--user"] if own else [])) == (0, "")


@needs_systemd
def test_the_unit_is_hardened_by_systemds_own_count(analyze, tmp_path):
    status, words = analyze(Service(COMMAND, tmp_path, "mobizo"), "security", "--offline=true", "--threshold=40")
    assert status == 0, words[-500:]


def test_a_systems_unit_writes_nowhere_but_home_and_a_users_own_asks_for_nothing_that_only_root_may(tmp_path):
    unit, own = (parse(Service(COMMAND, tmp_path, "mobizo", own=own).text()) for own in (False, True))
    service = unit["Service"]
    assert (service["ProtectSystem"], service["ReadWritePaths"]) == ("strict", str(tmp_path))
    assert (service["Type"], service["Restart"], service["User"]) == ("notify", "on-failure", "mobizo")
    assert service["ExecStart"].split() == COMMAND
    removed = set(service) - set(own["Service"])
    assert removed >= {"User", "ProtectSystem", "ReadWritePaths", "PrivateTmp", "CapabilityBoundingSet"}
    assert service["NoNewPrivileges"] == own["Service"]["NoNewPrivileges"] == "yes"
    assert [each["Install"]["WantedBy"] for each in (unit, own)] == ["multi-user.target", "default.target"]


def test_words_survive_a_unit(tmp_path):
    unit = parse(Service([*COMMAND, "a$b", "a b", "100%", '"\\'], tmp_path / "c$d", "root").text())["Service"]
    assert unit["ExecStart"].endswith(r''' a$$b "a b" 100%% "\"\\"''')  # a dollar is no variable
    assert unit["ReadWritePaths"].endswith("c$d")  # no variables are known in paths
    with pytest.raises(BadRequest, match="control character"):
        Service([*COMMAND, "a\nExecStartPre=/bin/evil"], tmp_path, "root").text()


def test_the_command_prints_or_writes_the_unit(agent, home, dataset, server_key, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    options = ("--data", f"movies={dataset}", "--executor", "native", "--adb", "--user")
    preview = agent("install-service", *options, "--print")
    words = parse(preview.stdout)["Service"]["ExecStart"].split()
    assert words == [sys.executable, *COMMAND[1:5], f"movies={dataset}", "--executor", "native", "--adb="]
    assert "mobizo-agent enroll" in agent("install-service", *options, status=2).stderr
    enroll(home, "http://127.0.0.1:9", server_key)
    assert "systemctl --user" in agent("install-service", *options).stdout
    unit = tmp_path / "config" / "systemd" / "user" / UNIT
    assert unit.read_text() == preview.stdout
    assert unit in installed_units()
