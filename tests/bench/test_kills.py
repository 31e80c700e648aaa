"""The kill table finds what it looks for: a B that a kill has changed, and steps that were computed again."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from device_agent.engines.child_process import supervise
from device_agent.training.journal import RunDirectory
from shared.zo.trajectory import TrajectoryFile, TrajectoryHeader

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.agent.kills import Kind, Trainer, Trial, Work, measure, steps_in

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
HEADER = TrajectoryHeader(job_id="job", job_seed=0, recipe_id="0" * 64, noise="rademacher", queries=1, size=1)

# Trains as an engine does, but for the program. If it drifts, B depends on how often it was started.
TRAINER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from shared.zo.trajectory import TrajectoryFile, TrajectoryHeader
run, header, steps, drifts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "drifts"
ledger = TrajectoryFile(run / "trajectory.bin", TrajectoryHeader.model_validate_json(header))
while ledger.trajectory.steps < steps:
    time.sleep(0.01)
    ledger.append_step(np.array([ledger.trajectory.steps], np.float32))
    print('{"progress": {"phase": "training", "step": %d}}' % ledger.trajectory.steps, flush=True)
b = (run / "starts").read_bytes() if drifts else b"B"
(run / "best.safetensors").write_bytes(b)
(run / "last.safetensors").write_bytes(b)
print('{"trained": true}', flush=True)
"""


class Small:
    """An engine that runs TRAINER."""

    name = "python"

    def __init__(self, word):
        self._word = word

    def train(self, run, report, stop):
        with (run.path / "starts").open("a") as starts:
            starts.write("*")
        words = [sys.executable, "-c", TRAINER, run.path, HEADER.model_dump_json(), str(STEPS), self._word]
        supervise(list(map(str, words)), run, report, stop, {"PYTHONPATH": str(ROOT)})
        return SimpleNamespace(result="whole")


class Run(Trainer):
    """A run without a plan, by a small engine."""

    def __init__(self, directory, word):
        self.run, self.engine = RunDirectory(directory), Small(word)


def table_row(directory, word, expected=None):
    row, found = measure(Kind("small", "replay", "trainer", 3, lambda path: Run(path, word)), directory, expected)
    assert row["trials"] == 3
    assert row["kills"] >= 3
    return row, found


def test_a_run_that_goes_on_where_it_was_is_no_mismatch(tmp_path):
    row, _ = table_row(tmp_path, "steady")
    assert row["mismatches"] == 0
    assert row["steps_computed_twice_beyond_one"] == 0


def test_a_b_that_a_kill_changes_is_a_mismatch_in_every_trial(tmp_path):
    row, found = table_row(tmp_path, "drifts")
    assert row["mismatches"] == 3
    # And one that differs from another engine's, with or without kills, counts once more.
    row, _ = table_row(tmp_path, "steady", found)
    assert row["mismatches"] == 4


def counted(*works):
    trial = Trial()
    for work in works:
        trial.add(work)
    return trial.lost + trial.told_twice


def test_steps_computed_twice_are_counted_beyond_the_one_in_progress():
    killed = Work(done=False, killed=True, told=[1, 2, 3], ledger=3)
    assert counted(killed, Work(True, False, [4, 5], 5)) == 0
    # On the disk, but killed before it was told of.
    assert counted(Work(False, True, [1, 2, 3], 4), Work(True, False, [5], 5)) == 0
    # SettableSensors of before it was on the disk: lost, and told of again.
    assert counted(Work(False, True, [1, 2, 3], 2), Work(True, False, [3, 4, 5], 5)) == 2
    # A ledger that has become shorter, though nothing was told.
    assert counted(Work(False, True, [], 4), Work(False, True, [], 1)) == 3


def test_a_torn_frame_is_no_step(tmp_path):
    ledger = TrajectoryFile(tmp_path / "ledger", HEADER)
    ledger.append_step(np.array([1.0], np.float32))
    ledger.close()
    (tmp_path / "ledger").write_bytes((tmp_path / "ledger").read_bytes() + b"S\0\0")
    assert steps_in(tmp_path / "ledger") == 1
    assert steps_in(tmp_path / "none") == 0
