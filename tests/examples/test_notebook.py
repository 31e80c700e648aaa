"""examples/notebook.ipynb, run cell by cell against a real server and agent with a tiny base of random weights."""

import json
import os
import signal
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from mobizo import Client
from shared.protocol import EnrollmentRequest
from tests.device_agent.native import ROOT
from tests.device_agent.service import call, environment, service, service_home, wait_until
from tests.device_agent.tiny import base, dataset

__all__ = ["base", "call", "dataset", "environment", "service", "service_home"]  # fixtures
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def agent(call, service, environment, dataset, tmp_path):
    """An agent with the data set `reviews`."""
    home = str(tmp_path / "agent")
    with Client(service.url, service.token) as client:
        wait_until(lambda: list(client.bases.list()))
        token = client.devices.create_enrollment_token(EnrollmentRequest(users=["alice"])).token
    call("device_agent", "enroll", "--server", service.url, "--token", token, "--name", "laptop", "--home", home)
    command = [sys.executable, "-m", "device_agent", "run", "--data", f"reviews={dataset}", "--home", home]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outputs(notebook):
    """The texts and the kinds of pictures that the cells printed or returned."""
    cell_outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in cell_outputs if output.output_type == "error"]
    data = [output.get("data", {}) for output in cell_outputs]
    texts = [output.get("text", "") for output in cell_outputs] + [each.get("text/plain", "") for each in data]
    return "".join(texts), {kind for each in data for kind in each if kind.startswith("image/")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_every_cell_runs(service, agent, environment, monkeypatch, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    own = {"MOBIZO_SERVER": service.url, "MOBIZO_TOKEN": service.token, "MOBIZO_BASE": "tiny"}
    for name, value in {**own, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}.items():
        monkeypatch.setenv(name, value)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    text, pictures = outputs(notebook)
    assert "succeeded" in text
    assert "validation_accuracy" in text
    assert pictures == {"image/png"}


def test_the_stored_outputs_are_of_a_whole_run_and_small():
    text, pictures = outputs(nbformat.read(NOTEBOOK, as_version=4))
    assert "succeeded" in text
    assert pictures == {"image/png"}
    assert NOTEBOOK.stat().st_size < 200_000
    assert "/home/" not in json.dumps(text)
