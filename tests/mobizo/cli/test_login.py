"""`mobizo login`, `logout` and `config`: profiles, their file, and which value wins, against a real server."""

import json
import stat

import pytest

from mobizo.profiles import Profile, Profiles, read_profiles, write_profiles
from shared.errors import BadRequest
from tests.mobizo.conftest import run
from tests.mobizo.terminal import on_terminal


@pytest.fixture
def call(monkeypatch):
    for name in ("MOBIZO_SERVER", "MOBIZO_TOKEN", "MOBIZO_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    return run


@pytest.fixture
def file(config):
    return config / "config.toml"


def log_in(call, fleet, token, *options):
    return call("login", "--server", fleet.url, "--with-token", *options, stdin=f"{token}\n")


def test_a_terminal_asks_for_the_server_and_hides_the_token(call, fleet, app, file):
    status, screen = on_terminal("login", input_lines=f"{fleet.url}/\n{app.token}\n")
    assert status == 0, screen
    assert app.token not in screen
    assert "app of tenant default" in screen
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]
    assert "app of tenant default" in call("whoami")
    assert app.token not in call("config")
    assert str(file) in call("config")
    call("logout")
    assert read_profiles(file).profiles == {"default": Profile(fleet.url)}
    assert "mobizo login" in call("whoami", exit_code=2)
    assert "no token" in call("logout", exit_code=1)


def test_a_token_is_checked_before_it_is_stored(call, fleet, app, file, tmp_path):
    assert "mobizo login" in call("login", "--server", fleet.url, "--with-token", stdin="wrong\n", exit_code=1)
    assert "copy it again" in call("login", "--server", fleet.url, "--with-token", stdin="two words\n", exit_code=2)
    assert "--token-file" in call("login", "--server", fleet.url, exit_code=2)
    assert "--server" in call("login", "--with-token", stdin=app.token, exit_code=2)
    assert not file.exists()
    (tmp_path / "token").write_text(f"{app.token}\n")
    report = json.loads(call("login", "--server", fleet.url, "--token-file", tmp_path / "token", "--json"))
    assert (report["profile"], report["server"], report["whoami"]["role"]) == ("default", fleet.url, "app")


def test_options_override_the_environment_and_the_environment_the_file(call, fleet, app, operator, monkeypatch):
    log_in(call, fleet, app.token)
    log_in(call, fleet, operator.token, "--profile", "ops")

    def role(*options):
        return json.loads(call("whoami", *options, "--json"))["role"]

    def origins(*options):
        settings = json.loads(call("config", *options, "--json"))
        return [settings[name]["origin"] for name in ("profile", "server", "token")]

    assert origins() == ["the file", "profile default", "profile default"]
    assert (role(), role("--profile", "ops"), role("--token", operator.token)) == ("app", "operator", "operator")
    monkeypatch.setenv("MOBIZO_PROFILE", "ops")
    assert (role(), origins()[0]) == ("operator", "MOBIZO_PROFILE")
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    assert (role(), origins()) == ("app", ["MOBIZO_PROFILE", "MOBIZO_SERVER", "MOBIZO_TOKEN"])
    assert role("--profile", "ops") == "operator"
    assert origins("--profile", "ops") == ["--profile", "profile ops", "profile ops"]
    assert role("--token", operator.token) == "operator"
    assert "mobizo login --profile nobody" in call("whoami", "--profile", "nobody", exit_code=2)


def test_a_token_is_sent_to_its_own_server_only(call, fleet, app):
    log_in(call, fleet, app.token)
    message = call("whoami", "--server", "http://127.0.0.1:9", exit_code=2)
    assert f"the token of profile default is for {fleet.url}" in message


def test_config_chooses_the_default_profile(call, fleet, app, operator, file):
    log_in(call, fleet, app.token)
    log_in(call, fleet, operator.token, "--profile", "lab")
    assert "there is no profile 'none'" in call("config", "use", "none", exit_code=2)
    call("config", "use", "lab")
    assert read_profiles(file).current == "lab"


def test_texts_survive_the_file(tmp_path):
    profiles = Profiles("a-B_1", {"a-B_1": Profile('http://x/"\\\x7f\n\t\u2028\U0001f600', "t" * 3000)})
    write_profiles(tmp_path / "new" / "config.toml", profiles)
    assert read_profiles(tmp_path / "new" / "config.toml") == profiles


@pytest.mark.parametrize(
    "text", ["x", "a = 1", "current = 1", "profile = 1", "[profile.a]\ntoken = 1", '[profile."a b"]']
)
def test_a_damaged_file_is_named(call, file, text):
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(BadRequest, match=r"config\.toml"):
        read_profiles(file)
    assert str(file) in call("whoami", exit_code=2)
