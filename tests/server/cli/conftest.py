"""`mobizo-server` called in this process."""

import pytest
from typer.testing import CliRunner

from server.cli import main as cli


def call(*arguments, code=0, typed=None):
    """What a command printed, or what it raised."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture
def command(home, monkeypatch):
    """Runs `mobizo-server` on the test's home."""
    for name, value in home.settings.environment().items():
        monkeypatch.setenv(name, value)
    return call
