"""docs/start.md: its blocks run as they stand, with a tiny base, in a home directory of their own."""

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


@pytest.mark.slow
def test_its_blocks_run_as_they_stand(tmp_path):
    blocks = list(shown("docs/start.md"))
    assert len(blocks) == 4
    write_base(tmp_path / "tiny")
    write_tickets(tmp_path / "tickets.csv", range(80))
    write_tickets(tmp_path / "newer.csv", range(80, 120))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = "\n".join(blocks).replace("MODEL.gguf", "tiny").replace("8321", str(port))
    script = script.replace("mobizo-agent serve >", f"mobizo-agent serve --port {port} >")
    own = {"HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    environment = plain_environment(CACHE_VARIABLE) | cached_compiler.environment() | own
    done = run_script(script, tmp_path, environment)
    assert re.search(r'"label":"(yes|no)"', done.stdout)
    assert "tickets@v2" in done.stdout + done.stderr
