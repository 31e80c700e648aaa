"""`python -m simulation` as a process: what it prints and writes, and kill -9 in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.errors import Conflict
from simulation.cli import main
from simulation.records import Store

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["--devices", "6", "--rounds", "3", "--engine", "inline"]
FILE = """
[data]
per_device = 6
held_out = 3
test = 16
[cohort.training]
steps = 3
lr = 0.1
evaluation_interval = 1000
"""


@pytest.fixture
def command(program, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(FILE)
    return [sys.executable, "-m", "simulation", "--config", str(file), "--program", str(program), *FLAGS]


def finished(command, *more):
    return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_killed_simulation_goes_on_and_reports_what_it_would_have(command, tmp_path):
    whole = finished(command, "--json", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    said = json.loads(whole.stdout)

    place = tmp_path / "killed"
    process = subprocess.Popen([*command, str(place)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(Store(place).rounds()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = len(Store(place).rounds())
    assert 2 <= kept <= 4

    again = finished(command, "--json", str(place))
    assert json.loads(again.stdout)["digest"] == said["digest"]
    assert [each["number"] for each in said["rounds"]] == [0, 1, 2, 3]
    assert json.loads((place / "report.json").read_text()) == json.loads(again.stdout)


@pytest.mark.slow
def test_ctrl_c_ends_workers_too_and_says_how_to_go_on(command, tmp_path):
    place = tmp_path / "stopped"
    words = [*command, "--engine", "processes", "--workers", "1", "--rounds", "10000", str(place)]
    # A group of its own, which is what a terminal sends Ctrl-C to.
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0)
    while len(Store(place).rounds()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate()  # until the last process that could write there has ended
    assert process.returncode == 130
    assert said.decode().splitlines() == [
        f"stopped; finished rounds are in {place}, and the same command resumes the simulation"
    ]
    assert "Traceback" not in (place / "workers.log").read_text()
    assert len(Store(place).rounds()) >= 2


def stopped(capsys, *words):
    """What a command says that ends with status 1 before it compiles anything."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_place_that_is_none_and_data_that_is_not_there(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert stopped(capsys, file) == f"{file}: File exists"
    said = stopped(capsys, tmp_path / "new", "--base", "nothing.gguf", "--data", tmp_path)
    assert said == f"{tmp_path} has no train.jsonl"


def test_a_damaged_round_is_named(tmp_path):
    file = tmp_path / "rounds" / "0000" / "round.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(Conflict, match=r"0000/round.json is damaged"):
        Store(tmp_path).rounds()


@pytest.mark.slow
def test_people_get_a_table_a_page_and_plots(command, tmp_path):
    place = tmp_path / "report"
    done = finished(command, str(place))
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert str(place / "report.html") in done.stdout.replace("\n", "")
    said = json.loads((place / "report.json").read_text())
    last = f"{said['rounds'][-1]['accuracy']:.1%}"
    for name in ("report.md", "report.html"):
        text = (place / name).read_text()
        assert last in text
        assert said["digest"] in text
        assert all(plot in text for plot in ("accuracy.png", "devices.png", "bytes.png"))
    assert all((place / f"{plot}.png").read_bytes().startswith(b"\x89PNG") for plot in ("accuracy", "devices", "bytes"))


@pytest.mark.slow
def test_a_mistake_is_one_line_and_status_1(command, tmp_path):
    done = finished(command, "--engine", "steam", str(tmp_path / "wrong"))
    assert done.returncode == 1
    assert "engine 'steam'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
