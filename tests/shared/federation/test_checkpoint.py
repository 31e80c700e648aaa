"""A mean that is killed goes on where it was, and counts nobody twice."""

import subprocess
import sys

import numpy as np
import pytest

from shared.cohort import AggregatorSettings
from shared.federation.aggregation import Weighing, combine
from shared.federation.checkpoint import Checkpoint
from shared.federation.mean import WeightedMean
from tests.shared.federation import interrupted


def begin(path):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.shared.federation.interrupted", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def advance(process, updates):
    """The numbers of the updates that it took."""
    taken = []
    for _ in range(updates):
        taken.append(int(process.stdout.readline()))
        process.stdin.write("\n")
        process.stdin.flush()
    taken.append(int(process.stdout.readline()))  # it waits for leave to take this one
    return taken


def test_kills_count_nobody_twice(tmp_path):
    path, firsts = tmp_path / "mean", []
    for updates in (2, 8, 4):
        process = begin(path)
        firsts.append(advance(process, updates)[0])
        process.kill()
        process.communicate()
    assert firsts == [0, 0, 6]  # two updates were too few for a save; of eight, six had been saved
    process = begin(path)
    out, _ = process.communicate("\n" * interrupted.COUNT)
    lines = out.split("\n")
    assert int(lines[0]) == 9
    _, count, weight, clipped, flat = lines[-2].split()
    expected = combine(interrupted.source(), AggregatorSettings(clip_norm=99.0), Weighing(by="examples"))
    assert (int(count), float(weight)) == (interrupted.COUNT, sum(range(interrupted.COUNT + 1)))
    assert int(clipped) == expected.clipped > 0
    assert bytes.fromhex(flat) == expected.update.tobytes()


@pytest.fixture
def saved(tmp_path):
    checkpoint, mean = Checkpoint(tmp_path / "mean"), WeightedMean(4)
    mean.add(np.arange(4, dtype=np.float32), 3)
    checkpoint.save("a" * 64, mean, 1)
    return tmp_path / "mean"


def test_what_was_saved_is_there_to_the_bit(saved):
    mean, clipped = Checkpoint(saved).load("a" * 64, 4)
    assert (mean.weight, mean.count, clipped) == (3, 1, 1)
    assert mean.sums.tolist() == [0, 3, 6, 9]
    mean.add(np.ones(4, np.float32))


def test_other_updates_begin_anew(saved):
    assert Checkpoint(saved).load("b" * 64, 4) is None
    assert Checkpoint(saved).load("a" * 64, 5) is None
    assert Checkpoint(saved.with_name("absent")).load("a" * 64, 4) is None


def test_a_damaged_file_begins_anew_wherever_it_is_damaged(saved):
    whole = saved.read_bytes()
    for at in range(0, len(whole), 9):
        saved.write_bytes(whole[:at])
        assert Checkpoint(saved).load("a" * 64, 4) is None
        saved.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert Checkpoint(saved).load("a" * 64, 4) is None


def test_a_save_that_fails_leaves_the_one_before(saved, tmp_path):
    before = saved.read_bytes()
    (tmp_path / "mean.part").mkdir()
    with pytest.raises(IsADirectoryError):
        Checkpoint(saved).save("a" * 64, WeightedMean(4), 0)
    assert saved.read_bytes() == before


def test_done_is_forgotten(saved):
    Checkpoint(saved).remove()
    assert not list(saved.parent.iterdir())
    Checkpoint(saved).remove()
