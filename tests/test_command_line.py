"""What the three commands have in common, in processes of their own, as people call them."""

import subprocess
import sys
from importlib.metadata import version

import pytest

COMMANDS = ("mobizo.cli", "server.cli.main", "device_agent.cli.main")


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_says_its_version_and_helps(module):
    def run(option):
        program = f"import sys; from {module} import main; sys.argv = ['command', {option!r}]; main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout

    assert run("--version") == f"mobizo {version('mobizo')}\n"
    assert "--version" in run("-h")
