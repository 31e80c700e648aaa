"""Whole runs on a phone, and what disturbs them: each ends with the undisturbed run's bytes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from device_agent.android.adb import Adb, NoPhone, NothingRuns, WrongProcessor
from device_agent.engines.adb import AdbEngine
from device_agent.engines.child_process import NativeEngine
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.training.journal import RunDirectory
from shared.zo.trajectory import Limits, parse_trajectory
from tests.device_agent.android.conftest import TRAINING, begin
from tests.device_agent.conftest import ROOT
from tests.device_agent.engines.runs import recorded_steps
from tests.device_agent.warm_starts import begin_from, random_b

FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")
THERE = "/data/local/tmp/mobizo"
STEPS = TRAINING["steps"]


def never():
    return False


def silent(_progress):
    """Nobody listens."""


def engine_of(adb, runner_directory):
    return AdbEngine(adb, runner_directory, poll_seconds=0.05)


@pytest.fixture
def engine(adb, runner_directory):
    return engine_of(adb, runner_directory)


def same(run, expected):
    return all((run.path / name).read_bytes() == (expected.path / name).read_bytes() for name in FILES)


class Once:
    """Does something once, as soon as the phone tells of `step`."""

    def __init__(self, step, act):
        self._step, self._act, self.done = step, act, False

    def __call__(self, progress):
        if progress.phase == "training" and progress.step >= self._step and not self.done:
            self.done = True
            self._act()


class Output:
    """What the runner of a run said, kept when the engine empties or removes the file."""

    def __init__(self, phone, job="job-1"):
        self._there, self._copy = phone.path(f"{THERE}/runs/{job}/out"), phone.path("/data/kept")

    def keep(self):
        """Looks at the file from now on."""
        os.link(self._there, self._copy)

    def steps(self):
        """Each step that was computed, in order."""
        whole = self._copy.read_text().rpartition("\n")[0].splitlines()
        reports = [json.loads(line).get("progress", {}) for line in whole]
        return [progress["step"] for progress in reports if progress.get("phase") == "training"]


def test_a_run_on_a_phone_is_the_native_engines(run, expected, engine, phone):
    reports = []
    message = engine.train(run, reports.append, never)
    assert message.result.evaluations == expected.result().evaluations
    assert same(run, expected)
    assert run.result() == message.result
    assert reports[-1].step == STEPS
    assert message.result.peak_rss_bytes > 1 << 20
    assert not phone.run(f"ls -A {THERE}/runs; ls -A {THERE}/aside")  # the data was in the plan


@pytest.mark.slow
def test_only_what_lacks_is_pushed(engine, adb, runner_directory, rademacher, movies, tmp_path, phone):
    phone.empty()
    first = begin(tmp_path / "a", rademacher, movies, None, steps=2)
    assert engine.train(first, silent, never).result is not None
    files = [rademacher.manifest.file(role) for role in ("program", "weights")]
    runner = sum(path.stat().st_size for path in runner_directory.rglob("*") if path.is_file())
    assert engine.phone.pushed_bytes == sum(file.size for file in files) + runner + first.native_plan.stat().st_size
    directory = phone.path(f"{THERE}/files")
    packed = {f"{rademacher.manifest.file('weights').sha256}.packed{ending}" for ending in ("", ".index")}
    assert {path.name for path in directory.iterdir()} == {file.sha256 for file in files} | packed
    assert all(phone.run(f"sha256sum {THERE}/files/{file.sha256}").split()[0] == file.sha256 for file in files)
    inodes = {path.name: path.stat().st_ino for path in directory.iterdir()}
    packed_at = {name: (directory / name).stat().st_mtime_ns for name in packed}
    second = begin(tmp_path / "b", rademacher, movies, None, steps=3)
    later = engine_of(adb, runner_directory)
    assert later.train(second, silent, never).result is not None
    assert later.phone.pushed_bytes == second.native_plan.stat().st_size
    assert {path.name: path.stat().st_ino for path in directory.iterdir()} == inodes
    assert {name: (directory / name).stat().st_mtime_ns for name in packed} == packed_at


def kill_adbd(phone):
    phone.kill()
    threading.Timer(1.0, phone.start, kwargs={"connected": False}).start()


def kill_adb_server(phone):
    phone.client("kill-server")


def kill_runner(phone):
    phone.run("kill -9 $(pidof mobizo-runner)")


def kill_all(phone):
    """As a restart of the phone does."""
    phone.run(f"kill -9 $(cat {THERE}/runs/job-1/keeper) $(pidof mobizo-runner)")


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "runs_on"), [(kill_adbd, True), (kill_adb_server, True), (kill_all, False)])
def test_what_is_killed_costs_nothing(run, expected, engine, phone, kill, runs_on):
    """A runner that the host cannot reach goes on by itself."""
    output = Output(phone)

    def cut():
        output.keep()
        kill(phone)

    once = Once(3, cut)
    assert engine.train(run, once, never).result is not None
    assert once.done
    assert same(run, expected)
    if runs_on:
        assert output.steps() == list(range(1, STEPS + 1))


def stand_in(directory, train):
    """A runner that starts, and whose training is a shell script."""
    directory.mkdir()
    program = directory / "mobizo-runner"
    program.write_text(f"#!/bin/sh\n[ $1 = version ] && exit 0\n{train}\n")
    return directory


NO_MEMORY = '{"error": {"code": "does-not-fit", "detail": "memory ran out"}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("kill -9 $$", DoesNotFit, "killed before its first step"),
        (f"echo '{NO_MEMORY}'; exit 1", DoesNotFit, "memory ran out"),
        ("echo the last words >&2; exit 5", RuntimeFailed, "status 5: the last words"),
    ],
)
def test_a_runner_that_fails_is_told_of_once(run, expected, engine, adb, tmp_path, script, error, words):
    with pytest.raises(error, match=words):
        engine_of(adb, stand_in(tmp_path / "runner", script)).train(run, silent, never)
    assert engine.train(run, silent, never).result is not None
    assert same(run, expected)


ALONE = """
import sys
from pathlib import Path
from device_agent.android.adb import Adb
from device_agent.engines.adb import AdbEngine
from device_agent.training.journal import RunDirectory
serial, command, runner, run = sys.argv[1:]
engine = AdbEngine(Adb(serial, Path(command)), Path(runner), poll_seconds=0.05)
engine.train(RunDirectory(Path(run)), lambda told: print(told.phase, told.step, flush=True), lambda: False)
"""


@pytest.mark.slow
def test_the_engine_is_killed_and_another_goes_on(run, expected, engine, phone, runner_directory):
    words = [phone.serial, phone.adb, runner_directory, run.path]
    output = Output(phone)
    with subprocess.Popen([sys.executable, "-c", ALONE, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as alone:
        for line in alone.stdout:
            phase, step = line.split()
            if phase == "training" and int(step) >= 3:
                break
        output.keep()
        alone.kill()
    assert alone.returncode == -signal.SIGKILL
    assert engine.train(run, silent, never).result is not None
    assert same(run, expected)
    assert output.steps() == list(range(1, STEPS + 1))
    assert engine.phone.pushed_bytes == 0


@pytest.mark.slow
def test_stop_ends_the_runner_and_keeps_what_it_did(run, expected, engine, phone):
    once = Once(3, lambda: None)
    message = engine.train(run, once, lambda: once.done)
    assert message.stopped
    assert message.result is None
    assert phone.run("pidof mobizo-runner") == ""
    assert recorded_steps(run) >= 3
    assert run.ledger.read_bytes() == phone.path(f"{THERE}/runs/job-1/trajectory.bin").read_bytes()
    assert engine.train(run, silent, never).result is not None
    assert same(run, expected)


@pytest.mark.slow
def test_a_phone_that_is_away_when_asked_to_stop_goes_on(run, expected, engine, phone):
    output = Output(phone)

    def cut():
        output.keep()
        phone.run("kill -STOP $(pidof mobizo-runner)")  # so that it has not ended when it is looked for
        phone.kill()

    once, waits = Once(3, cut), []
    message = engine.train(
        run, lambda progress: (once(progress), waits.append(progress.phase == "waiting")), lambda: any(waits)
    )
    assert message.stopped
    assert phone.run("pidof mobizo-runner") != ""
    phone.run("kill -CONT $(pidof mobizo-runner)")
    phone.start()
    assert engine.train(run, silent, never).result is not None
    assert same(run, expected)
    assert output.steps() == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["phone emptied", "host's copy torn"])
def test_one_whole_copy_of_the_ledger_is_enough(run, expected, engine, phone, harm):
    once = Once(5, lambda: None)
    assert engine.train(run, once, lambda: once.done).stopped
    done, output = recorded_steps(run), Output(phone)
    if harm == "phone emptied":
        phone.empty()
    else:
        run.ledger.write_bytes(run.ledger.read_bytes()[:-3])
    assert engine.train(run, Once(done + 1, output.keep), never).result is not None
    assert output.steps() == list(range(done + 1, STEPS + 1))
    assert same(run, expected)


@pytest.mark.slow
def test_exact_gradients_go_on_from_the_phones_checkpoints(gradient, movies, tmp_path, engine, phone, runner_directory):
    # Many looks at the phone fit between the eleventh step and the last.
    expected, run = (begin(tmp_path / name, gradient, movies, steps=48) for name in ("expected", "run"))
    assert NativeEngine(runner_directory).train(expected, silent, never).result is not None
    once = Once(11, lambda: None)
    assert engine.train(run, once, lambda: once.done).stopped
    assert phone.path(f"{THERE}/runs/job-1/checkpoints/step-10.bin").exists()
    assert engine.train(run, silent, never).result is not None
    assert same(run, expected)


@pytest.mark.slow
def test_a_run_from_an_adapter_with_pulls_is_the_native_engines(adb, runner_directory, rademacher, movies, tmp_path):
    runs = []
    for engine in (engine_of(adb, runner_directory), NativeEngine(runner_directory)):
        runs.append(RunDirectory(tmp_path / engine.name))
        begin_from(runs[-1], rademacher.plan(movies, **TRAINING, proximal=0.5), random_b(rademacher.manifest))
        assert engine.train(runs[-1], silent, never).result.start_accuracy is not None
    assert same(*runs)


@pytest.mark.slow
def test_another_runs_ledger_on_the_phone_is_no_beginning(run, expected, engine, phone, rademacher, movies, tmp_path):
    other = begin(tmp_path / "other", rademacher, movies, seed=6)
    once = Once(5, lambda: None)
    assert engine.train(other, once, lambda: once.done).stopped
    assert engine.train(run, silent, never).result is not None
    assert same(run, expected)


@pytest.mark.slow
def test_limits_reach_the_runner(run, engine):
    slow, changed = Limits(rest=100), Limits(rest=1)
    run.limit(slow)  # many looks at the phone fit between the fifth step and the last
    message = engine.train(run, Once(5, lambda: run.limit(changed)), never)
    trajectory, _ = parse_trajectory(run.ledger.read_bytes())
    assert message.result is not None
    assert [(limits.rest, limits.max_length) for limits in trajectory.limits] == [(100, None), (1, None)]
    assert trajectory.limits[0].step == 0
    assert 5 <= trajectory.limits[1].step < STEPS


@pytest.mark.slow
def test_a_new_run_needs_a_phone(run, phone, runner_directory):
    phone.client("disconnect")
    engine = engine_of(Adb(None, phone.adb), runner_directory)
    with pytest.raises(NoPhone, match="USB debugging"):
        engine.train(run, silent, never)


@pytest.mark.slow
def test_two_phones_and_a_run_that_knows_its_own(run, expected, phone, runner_directory):
    once = Once(3, lambda: phone.start(phone.port + 1))
    assert engine_of(Adb(None, phone.adb), runner_directory).train(run, once, lambda: once.done).stopped
    assert engine_of(Adb(None, phone.adb), runner_directory).train(run, silent, never).result is not None
    assert same(run, expected)


@pytest.fixture
def bundle(runner_directory, tmp_path):
    """The runner as a bundle (bundle.cmake), made of this machine's own libraries for a phone of its processor."""
    bundle = tmp_path / "bundle"
    shutil.copytree(runner_directory / "lib", bundle / "lib")
    (bundle / "bin").mkdir()
    shutil.copy(runner_directory / "mobizo-runner", bundle / "bin")
    process = subprocess.run(["ldd", runner_directory / "mobizo-runner"], capture_output=True, text=True, check=True)
    paths = [Path(path) for path in re.findall(r"(/\S+) \(", process.stdout)]
    for path in paths:
        if not (bundle / "lib" / path.name).exists():
            shutil.copy(path, bundle / "lib")
    loader = next(path.name for path in paths if path.name.startswith("ld-"))
    source = ROOT / "device_agent/runner/launcher.cpp"
    command = ["c++", "-static", f'-DMOBIZO_LOADER="{loader}"', source, "-o", bundle / "mobizo-runner"]
    subprocess.run(command, check=True)
    return bundle


@pytest.mark.slow
def test_a_bundle_trains_is_found_by_its_name_and_stopped(run, expected, adb, bundle, phone):
    engine, names = engine_of(adb, bundle), []
    once = Once(3, lambda: names.append(phone.run("pidof mobizo-runner")))
    assert engine.train(run, once, lambda: once.done).stopped
    assert names[0].strip().isdigit()
    assert phone.run("pidof mobizo-runner") == ""
    assert engine.train(run, Once(6, lambda: kill_runner(phone)), never).result is not None
    assert same(run, expected)


@pytest.mark.slow
def test_a_phone_that_runs_nothing_from_its_storage(run, engine, phone):
    phone.empty()
    phone.run("mount -o remount,noexec /data")
    try:
        with pytest.raises(NothingRuns, match=r"mounts /data/local/tmp with noexec.*another phone.*ermission denied"):
            engine.train(run, silent, never)
    finally:
        phone.run("mount -o remount,exec /data")
    assert engine.phone.pushed_bytes == 0
    assert not run.ledger.exists()


@pytest.mark.slow
def test_a_runner_for_another_processor(run, adb, tmp_path, runner_directory, phone):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    runners = phone.run(f"ls {THERE}/runner")
    program = bytearray((runner_directory / "mobizo-runner").read_bytes())
    program[18:20] = b"\xf3\x00"  # e_machine: RISC-V
    (foreign / "mobizo-runner").write_bytes(program)
    with pytest.raises(WrongProcessor, match=r"does not start on this phone .*not executable.*build it for the phone"):
        engine_of(adb, foreign).train(run, silent, never)
    assert phone.run(f"ls {THERE}/runner") == runners
