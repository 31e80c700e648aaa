"""Executors on a phone over a real adbd. A run whose link is cut ends with the bytes of an undisturbed run."""

import subprocess
import sys
import threading
import time
from contextlib import closing

import psutil
import pytest

from device_agent.android.adb import Adb, PhoneUnreachable, PhoneUnsuitable
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.executors.phone import PhoneLauncher
from device_agent.executors.runner import RunnerLauncher
from tests.device_agent.android.phone import Phone
from tests.device_agent.native import ROOT
from tests.device_agent.training.runs import begun, copy_run, hashes, ignore, train

THERE = "/data/local/tmp/mobizo"
SETTINGS = {"steps": 24, "evaluation_interval": 8, "seed": 5, "lr": 1e-2}
SECONDS = 20.0  # for processes on the phone to end


def train_on(launcher, run, report=ignore):
    """Trains a run to its end, again after each lost link; returns the reasons of the losses."""
    losses = []
    while run.result() is None:
        try:
            train(run, launcher, report)
        except PhoneUnreachable as error:
            losses.append(error.detail)
            time.sleep(0.05)
    return losses


def once_at(step, act):
    """Returns a report that calls `act` when a step after this one is reported for the first time."""
    acts = [act]

    def report(progress):
        if progress.phase == "training" and progress.step >= step and acts:
            acts.pop()()

    return report


def launch_on(launcher, program, **options):
    return launcher.launch(program.manifest, *program.files, **options)


def running(phone):
    """Process ids of runners on the phone."""
    return phone.run("pidof mobizo-runner").split()


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.fixture
def run(rademacher, movies, tmp_path):
    return begun(tmp_path / "run", rademacher.plan(movies, **SETTINGS))


@pytest.fixture(scope="session")
def expected(rademacher, movies, runner_directory, tmp_path_factory):
    """What the run leaves on this machine, undisturbed."""
    run = begun(tmp_path_factory.mktemp("here") / "run", rademacher.plan(movies, **SETTINGS))
    train(run, RunnerLauncher(runner_directory))
    return hashes(run)


def test_a_run_on_a_phone_is_that_of_this_machine(launcher, run, expected, phone):
    assert train_on(launcher, run) == []
    assert hashes(run) == expected
    wait_for(lambda: not running(phone))
    assert set(phone.run(f"ls -A {THERE}").split()) == {"files", "runner", "incoming"}
    assert not phone.run(f"ls -A {THERE}/incoming")


def test_packed_weights_lie_beside_the_weights_and_are_used_again(launcher, run, rademacher, phone, tmp_path):
    phone.empty()
    directory, sha256 = phone.path(f"{THERE}/files"), rademacher.manifest.file("weights").sha256
    packed = {f"{sha256}.packed", f"{sha256}.packed.index"}
    again = copy_run(run, tmp_path / "again")
    train(run, launcher)
    assert packed < {path.name for path in directory.iterdir()}
    before = {name: (directory / name).stat().st_mtime_ns for name in packed}
    train(again, launcher)
    assert {name: (directory / name).stat().st_mtime_ns for name in packed} == before


def pull_the_cable(phone):
    phone.client("disconnect")


def kill_the_adb_server(phone):
    phone.client("kill-server")


def kill_the_adb_client(_phone):
    for process in psutil.Process().children():
        if process.name() == "adb" and "shell" in process.cmdline():
            process.kill()


SLOW_CUTS = (Phone.kill, kill_the_adb_server, kill_the_adb_client)


@pytest.mark.parametrize("cut", [pull_the_cable, *(pytest.param(cut, marks=pytest.mark.slow) for cut in SLOW_CUTS)])
def test_a_lost_link_ends_the_runner_and_the_run_goes_on(launcher, run, expected, phone, cut):
    def cut_once():
        cut(phone)
        wait_for(lambda: not running(phone))
        if cut is Phone.kill:
            phone.start()

    losses = train_on(launcher, run, once_at(5, cut_once))
    assert losses == [f"{phone.serial}: the link broke; check its cable and `adb devices`"]
    assert hashes(run) == expected


@pytest.mark.slow
def test_a_cable_that_is_lost_twenty_times_during_calls(
    launcher, rademacher, movies, runner_directory, phone, tmp_path
):
    """The cable is pulled at moments that the run does not choose."""
    plan = rademacher.plan(movies, **SETTINGS | {"steps": 600, "evaluation_interval": 300})
    here, run = begun(tmp_path / "here", plan), begun(tmp_path / "run", plan)
    train(here, RunnerLauncher(runner_directory))
    cuts = []

    def cut_soon(progress):
        if progress.phase == "training" and len(cuts) < 20 and not (cuts and cuts[-1].is_alive()):
            cuts.append(threading.Timer(0.001 * len(cuts), pull_the_cable, (phone,)))
            cuts[-1].start()

    train_on(launcher, run, cut_soon)
    assert len(cuts) == 20
    wait_for(lambda: not running(phone))
    assert hashes(run) == hashes(here)


ALONE = """
import sys
from pathlib import Path
from device_agent.android.adb import Adb
from device_agent.executors.phone import PhoneLauncher
from shared.program import ProgramManifest
serial, command, runner, manifest, program, weights = sys.argv[1:]
launcher = PhoneLauncher(Adb(serial, Path(command)), Path(runner))
executor = launcher.launch(ProgramManifest.model_validate_json(manifest), Path(program), Path(weights))
print("launched", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_agent_leaves_no_runner_on_the_phone(rademacher, phone, runner_directory):
    files = [rademacher.manifest.model_dump_json(), *rademacher.files]
    command = [sys.executable, "-c", ALONE, phone.serial, phone.adb, runner_directory, *files]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as alone:
        assert alone.stdout.readline() == "launched\n"
        assert len(running(phone)) == 1
        alone.kill()
    wait_for(lambda: not running(phone))


def test_another_phone_continues_the_run(run, runner_directory, expected, phone):
    launcher = PhoneLauncher(Adb(None, phone.adb), runner_directory)

    def swap():
        phone.kill()
        phone.client("disconnect")
        phone.empty()  # the phones of these tests share their storage
        phone.start(phone.port + 1)

    train_on(launcher, run, once_at(5, swap))
    assert hashes(run) == expected
    assert launcher.phone.adb.device().endswith(str(phone.port + 1))


@pytest.mark.slow
def test_two_phones_and_no_serial(rademacher, runner_directory, phone):
    launcher = PhoneLauncher(Adb(None, phone.adb), runner_directory)
    launch_on(launcher, rademacher).close()
    phone.start(phone.port + 1)
    with closing(launch_on(launcher, rademacher)) as executor:  # the one that it has used
        assert not executor.call("adapter", [])[0].any()
    with pytest.raises(PhoneUnreachable, match="--adb SERIAL"):
        launch_on(PhoneLauncher(Adb(None, phone.adb), runner_directory), rademacher)


def stand_in(directory, serve):
    """A runner that starts, and whose `serve` is a shell script."""
    directory.mkdir()
    program = directory / "mobizo-runner"
    program.write_text(f"#!/bin/sh\n[ $1 = version ] && exit 0\n{serve}\n")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("kill -9 $$", DoesNotFit, "killed the runner, probably out of memory"),
        ("kill -15 $$", PhoneUnreachable, "was ended"),
        ("kill -6 $$", RuntimeFailed, "status 134"),
        ("echo the last words >&2; exit 5", RuntimeFailed, "status 5: the last words"),
        ("echo the last words >&2; exit 1", RuntimeFailed, "status 1: the last words"),
        (r"printf '\0\1\0'; exit 3", RuntimeFailed, "status 3"),
        (r"printf '\1\5\0\0\0wrong'", RuntimeFailed, "wrong"),
        (r"printf '\2\4\0\0\0full'", DoesNotFit, "full"),
    ],
)
def test_a_runner_that_fails(adb, rademacher, tmp_path, script, error, words):
    with pytest.raises(error, match=words):
        launch_on(PhoneLauncher(adb, stand_in(tmp_path / "runner", script)), rademacher)


@pytest.mark.slow
def test_a_phone_that_runs_nothing_from_its_storage(launcher, rademacher, phone):
    def refused():
        with pytest.raises(PhoneUnsuitable, match=r"mounts /data/local/tmp with noexec.*phone.*ermission denied"):
            launch_on(launcher, rademacher)

    phone.empty()
    phone.run("mount -o remount,noexec /data")
    try:
        refused()
        assert launcher.phone.pushed_bytes == 0
        phone.run("mount -o remount,exec /data")
        launch_on(launcher, rademacher).close()
        phone.run("mount -o remount,noexec /data")
        refused()
    finally:
        phone.run("mount -o remount,exec /data")


@pytest.mark.slow
def test_a_runner_for_another_processor(adb, rademacher, tmp_path, runner_directory, phone):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    runners = phone.run(f"ls {THERE}/runner")
    program = bytearray((runner_directory / "mobizo-runner").read_bytes())
    program[18:20] = b"\xf3\x00"  # e_machine: RISC-V
    (foreign / "mobizo-runner").write_bytes(program)
    with pytest.raises(
        PhoneUnsuitable, match=r"does not start on this phone .*not executable.*install mobizo-runner-phone"
    ):
        launch_on(PhoneLauncher(adb, foreign), rademacher)
    assert phone.run(f"ls {THERE}/runner") == runners
