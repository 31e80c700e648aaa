"""docs/federation.md: its quick start runs as written, and the settings files that it shows are valid."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from shared.federation.cohort import CohortSettings
from simulation.settings import read_settings
from tests.server.actors import job_request
from tests.server.federation.conftest import URL, Band, band, cohort_request

__all__ = ["Band", "band"]  # a fixture
DOCS = (Path(__file__).resolve().parents[2] / "docs" / "federation.md").read_text()


def blocks(kind):
    """Returns the fenced blocks of a language, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)


@pytest.fixture
def call(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda line: command(*shlex.split(line, comments=True)[1:])


def test_the_quick_start(call, band, tmp_path):
    """Runs the commands as written, except for the reader's own base model, device ids and job file."""
    (script,) = blocks("bash")
    name, body, commands = re.fullmatch(
        r"cat > (\S+) <<'JSON'\n(.*?)^JSON\n(.*)", script, re.MULTILINE | re.DOTALL
    ).groups()
    settings = json.loads(body) | {"base": "tiny"}
    (tmp_path / name).write_text(json.dumps(settings))
    job = job_request(user="dave", adapter="dave-reviews", dataset="reviews", start="readers")
    del job["recipe"]  # it is the cohort's then
    (tmp_path / "dave.json").write_text(json.dumps(job))
    create, *joins, rounds, updates, submit = commands.splitlines()
    call(create)
    band.view = band.app.get(URL).json()
    for line in joins:
        user = shlex.split(line)[4]
        device = band.devices[user] = band.fleet.device(name=user, users=[user])
        call(re.sub(r"device_\w+\.\.\.", device.device_id, line))
    band.work()  # as the worker beside a server does by itself
    assert "open" in call(rounds)
    assert call(updates).count("waiting") == len(band.devices) == 3
    band.home.compile()
    for user, device in band.devices.items():
        lease = device.lease("reviews", capabilities={"cohorts": True})
        assert band.upload(user, lease, 1.0).status_code == 200
        response = band.complete(user, lease, steps=settings["training"]["steps"])
        assert response.status_code == 200, response.text
    band.work()
    assert "published" in call(rounds)
    call(submit)


def test_the_shown_settings_files_are_valid():
    masked = next(json.loads(block) for block in blocks("json") if "masking" in block)
    assert CohortSettings.model_validate(cohort_request(**masked)).masking.minimum == masked["masking"]["minimum"]
    simulated = next(tomllib.loads(block) for block in blocks("toml") if "faults" in block)
    assert read_settings(None, simulated).cohort.aggregator.trim_share == 0.25
