"""The kill table detects a B that a kill has changed, and steps that were computed again."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from device_agent.training.run_directory import RunDirectory
from shared.zo.trajectory import TrajectoryFile, TrajectoryHeader

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.agent.kills import Attempt, KillableRun, Scenario, Trial, measure, recorded_steps

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
HEADER = TrajectoryHeader(job_id="job", job_seed=0, recipe_id="0" * 64, noise="rademacher", queries=1, size=1)

# Trains like a run, but without a program. With "drifts", B depends on the number of starts.
TRAINER = """
import sys, time
from pathlib import Path
import numpy as np
from shared.zo.trajectory import TrajectoryFile, TrajectoryHeader
run, header, steps, drifts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "drifts"
file = TrajectoryFile(run / "trajectory.bin", TrajectoryHeader.model_validate_json(header))
while file.trajectory.steps < steps:
    time.sleep(0.01)
    file.append_step(np.array([file.trajectory.steps], np.float32))
    print(file.trajectory.steps, flush=True)
b = (run / "starts").read_bytes() if drifts else b"B"
(run / "best.safetensors").write_bytes(b)
(run / "last.safetensors").write_bytes(b)
"""


class SmallRun(KillableRun):
    """A run by TRAINER."""

    def __init__(self, directory, mode):
        self.run, self._mode = RunDirectory(directory), mode

    def execute(self, kill_after):
        with (self.run.path / "starts").open("a") as starts:
            starts.write("*")
        command = [sys.executable, "-c", TRAINER, self.run.path, HEADER.model_dump_json(), str(STEPS), self._mode]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE) as process:
            timer = threading.Timer(kill_after or 0.0, process.kill)
            if kill_after is not None:
                timer.start()
            reported_steps = [int(line) for line in process.stdout if line.endswith(b"\n")]
            timer.cancel()
        done = process.returncode == 0
        return Attempt(done, not done, reported_steps, recorded_steps(self.run.trajectory))


def table_row(directory, mode, expected=None):
    row, hashes = measure(
        Scenario("small", "replay", "loop", 3, lambda path: SmallRun(path, mode)), directory, expected
    )
    assert row["trials"] == 3
    assert row["kills"] >= 3
    return row, hashes


def test_a_b_that_a_kill_changes_is_a_mismatch_in_every_trial(tmp_path):
    row, hashes = table_row(tmp_path, "drifts")
    assert row["mismatches"] == 3
    # And one that differs from another executor's, with or without kills, counts once more.
    row, _ = table_row(tmp_path, "steady", hashes)
    assert row["mismatches"] == 4
    row, _ = table_row(tmp_path, "steady")
    assert (row["mismatches"], row["steps_computed_twice_beyond_one"]) == (0, 0)


def count_recomputed(*attempts):
    trial = Trial()
    for attempt in attempts:
        trial.add(attempt)
    return trial.lost + trial.reported_twice


def test_steps_computed_twice_are_counted_beyond_the_one_in_progress():
    killed = Attempt(done=False, killed=True, reported_steps=[1, 2, 3], recorded_steps=3)
    assert count_recomputed(killed, Attempt(True, False, [4, 5], 5)) == 0
    # Killed after a step was written and before it was reported.
    assert count_recomputed(Attempt(False, True, [1, 2, 3], 4), Attempt(True, False, [5], 5)) == 0
    # Reported before it was written: lost, and reported again.
    assert count_recomputed(Attempt(False, True, [1, 2, 3], 2), Attempt(True, False, [3, 4, 5], 5)) == 2
    # A trajectory that became shorter, although nothing was reported.
    assert count_recomputed(Attempt(False, True, [], 4), Attempt(False, True, [], 1)) == 3


def test_a_torn_frame_is_no_step(tmp_path):
    trajectory = TrajectoryFile(tmp_path / "trajectory", HEADER)
    trajectory.append_step(np.array([1.0], np.float32))
    trajectory.close()
    (tmp_path / "trajectory").write_bytes((tmp_path / "trajectory").read_bytes() + b"S\0\0")
    assert recorded_steps(tmp_path / "trajectory") == 1
    assert recorded_steps(tmp_path / "none") == 0
