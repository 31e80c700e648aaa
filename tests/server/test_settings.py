"""Settings and their way into child processes."""

import pytest
from pydantic import ValidationError

from server.settings import Settings


def test_a_child_has_the_same_settings(tmp_path, monkeypatch):
    settings = Settings(
        home=tmp_path, port=1234, lease_seconds=7.5, compiler_command=["a b", "-c", 'print("x")'], host="::1"
    )
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings


def test_places_follow_the_home(tmp_path):
    settings = Settings(home=tmp_path)
    assert settings.url == f"sqlite:///{tmp_path}/mobizo.sqlite3"
    assert settings.key_path.is_relative_to(tmp_path)
    assert Settings(home=tmp_path, database_url="sqlite:////elsewhere").url == "sqlite:////elsewhere"


@pytest.mark.parametrize("changes", [{"port": -1}, {"lease_seconds": 0}, {"compile_attempts": 0}, {"port": "x"}])
def test_what_cannot_be(tmp_path, changes):
    with pytest.raises(ValidationError):
        Settings(home=tmp_path, **changes)
