"""docs/start.md: its blocks run as they stand, with a tiny base, in a home directory of their own."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import cached_compiler
from tests.device_agent.conftest import WORDS, write_base
from tests.docs.test_commands import FENCE, NOT_RUN, ROOT
from tests.programs import CACHE_VARIABLE


def write_tickets(path, numbers):
    rows = [f"the {WORDS[number % 7]} film {number},{('no', 'yes')[number % 2]}" for number in numbers]
    path.write_text("\n".join(["message,urgent", *rows]))


@pytest.mark.slow
def test_its_blocks_run_as_they_stand(tmp_path):
    blocks = [
        block["text"]
        for block in FENCE.finditer((ROOT / "docs" / "start.md").read_text())
        if not NOT_RUN.search(block["before"])
    ]
    assert len(blocks) == 4
    write_base(tmp_path / "tiny")
    write_tickets(tmp_path / "tickets.csv", range(80))
    write_tickets(tmp_path / "newer.csv", range(80, 120))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = "\n".join(blocks).replace("MODEL.gguf", "tiny").replace("8321", str(port))
    script = script.replace("mobizo-agent serve >", f"mobizo-agent serve --port {port} >")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MOBIZO_") or name == CACHE_VARIABLE
    }
    environment |= cached_compiler.environment() | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    stop = "trap 'kill $(jobs -p) || true' EXIT"
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {stop}\n{script}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r'"label":"(yes|no)"', done.stdout)
    assert "tickets@v2" in done.stdout + done.stderr
