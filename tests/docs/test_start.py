"""docs/start.md and README's block of commands run as they stand, with a tiny base, in a home of their own."""

import re
import socket

import pytest

from tests import cached_compiler
from tests.device_agent.tiny import WORDS, write_base
from tests.docs.test_commands import plain_environment, run_script, shown
from tests.programs import CACHE_VARIABLE


def write_tickets(path, numbers):
    rows = [f"the {WORDS[number % 7]} film {number},{('no', 'yes')[number % 2]}" for number in numbers]
    path.write_text("\n".join(["message,urgent", *rows]))


def run_here(script, directory):
    """Runs commands with a tiny base, a free port and a home directory of their own; returns the process."""
    write_base(directory / "tiny")
    write_tickets(directory / "tickets.csv", range(80))
    write_tickets(directory / "newer.csv", range(80, 120))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = script.replace("MODEL.gguf", "tiny").replace("8321", str(port))
    script = script.replace("mobizo-agent serve", f"mobizo-agent serve --port {port}")
    own = {"HOME": str(directory), "PYTHONWARNINGS": "ignore"}
    return run_script(script, directory, plain_environment(CACHE_VARIABLE) | cached_compiler.environment() | own)


@pytest.mark.slow
def test_its_blocks_run_as_they_stand(tmp_path):
    blocks = list(shown("docs/start.md"))
    assert len(blocks) == 4
    done = run_here("\n".join(blocks), tmp_path)
    assert re.search(r'"label":"(yes|no)"', done.stdout)
    assert "tickets@v2" in done.stdout + done.stderr


@pytest.mark.slow
def test_readme_s_block_runs_after_the_installation(tmp_path):
    (block,) = (text for text in shown("README.md") if "quickstart" in text)
    environment, installation, *commands = block.splitlines()
    assert environment.startswith("python3 -m venv")
    assert installation.startswith("pip install")
    done = run_here("\n".join(commands), tmp_path)
    assert done.stdout.splitlines()[-1]  # whatever a tiny model writes
