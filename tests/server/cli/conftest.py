"""`mobizo-server` called in this process, and bases for it."""

import sys

import pytest
from typer.testing import CliRunner

from server.cli import main as cli
from server.programs import local as local_compilation
from tests.server import fake_compiler
from tests.server.homes import write_source
from tests.server.llama import write_llama

FAKE = [sys.executable, fake_compiler.__file__]


def call(*arguments, code=0, typed=None):
    """What a command printed, or what it raised."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A base that the real compiler reads."""
    directory = tmp_path_factory.mktemp("bases") / "llama"
    write_llama(directory)
    return directory


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A base that the fake compiler reads, which takes the real one's place."""
    directory = tmp_path / "fake-base"
    write_source(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(local_compilation, "COMPILER", FAKE)
    return directory
