"""The wiring: what the web process and the workers may load, and what a home must have."""

import subprocess
import sys

import pytest

from server.app import create_app
from server.settings import Settings
from shared.errors import Unavailable

HEAVY = ("torch", "executorch", "transformers", "gguf")


@pytest.mark.parametrize("module", ["server.app", "server.worker", "server.serving", "server.cli.main"])
def test_nothing_of_the_model_world_is_imported(module):
    script = f"import sys, {module}; print(','.join(m for m in {HEAVY!r} if m in sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == ""


def test_a_worker_loads_no_web_server():
    script = "import sys, server.worker; print('uvicorn' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"


def test_a_home_that_was_not_set_up(tmp_path):
    with pytest.raises(Unavailable, match="mobizo-server init"):
        create_app(Settings(home=tmp_path))
    assert list(tmp_path.iterdir()) == []
