"""`mobizo simulate` as a process: its output and files, and resuming after kill -9."""

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
PROGRAM = "from simulation.cli import main; main()"
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
    return [sys.executable, "-c", PROGRAM, "--config", str(file), "--program", str(program), *FLAGS]


def run_to_end(command, *arguments):
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_killed_simulation_resumes_with_the_same_report(command, tmp_path):
    whole = tmp_path / "whole"
    uninterrupted = run_to_end(command, str(whole))
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    report, text = json.loads((whole / "report.json").read_text()), (whole / "report.md").read_text()
    assert str(whole / "report.md") in uninterrupted.stdout.replace("\n", "")
    assert f"{report['rounds'][-1]['accuracy']:.1%}" in text
    assert report["digest"] in text

    directory = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, str(directory)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(Store(directory).rounds()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished_rounds = len(Store(directory).rounds())
    assert 2 <= finished_rounds <= 4

    resumed = run_to_end(command, "--json", str(directory))
    assert json.loads(resumed.stdout)["digest"] == report["digest"]
    assert [each["number"] for each in report["rounds"]] == [0, 1, 2, 3]
    assert json.loads((directory / "report.json").read_text()) == json.loads(resumed.stdout)


@pytest.mark.slow
def test_ctrl_c_stops_the_workers_and_explains_how_to_resume(command, tmp_path):
    directory = tmp_path / "stopped"
    arguments = [*command, "--engine", "processes", "--workers", "1", "--rounds", "10000", str(directory)]
    # A separate process group, because a terminal sends Ctrl-C to the whole group.
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0)
    while len(Store(directory).rounds()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate()  # returns when the last process that may write to it has ended
    assert process.returncode == 130
    assert stderr.decode().splitlines() == [
        f"stopped; finished rounds are in {directory}, and the same command resumes the simulation"
    ]
    assert "Traceback" not in (directory / "workers.log").read_text()
    assert len(Store(directory).rounds()) >= 2


def error_line(capsys, *arguments):
    """Returns the error line of a command that ends with status 1 before compiling."""
    with pytest.raises(SystemExit) as exit_info:
        main([*map(str, arguments)])
    assert exit_info.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_unusable_directories_and_missing_data_are_reported(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert error_line(capsys, file) == f"{file}: File exists"
    message = error_line(capsys, tmp_path / "new", "--base", "nothing.gguf", "--data", tmp_path)
    assert message == f"{tmp_path} has no train.jsonl"


def test_a_damaged_round_is_named(tmp_path):
    file = tmp_path / "rounds" / "0000" / "round.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(Conflict, match=r"0000/round.json is damaged"):
        Store(tmp_path).rounds()


@pytest.mark.slow
def test_errors_are_one_line_with_status_1(command, tmp_path):
    process = run_to_end(command, "--engine", "steam", str(tmp_path / "wrong"))
    assert process.returncode == 1
    assert "engine 'steam'" in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1
