"""Weights that the native runner packed, kept for the next run: found again, and never used when they do not fit."""

import fcntl
import os
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest

from device_agent.inference.session import InferenceSession
from tests.device_agent.training.runs import begun, copy_run, hashes, train

SETTINGS = {"steps": 12, "lr": 0.3, "seed": 3, "evaluation_interval": 6}


@pytest.fixture
def weights(rademacher, tmp_path):
    """A copy of the weights file: packed weights are kept beside it."""
    return shutil.copy2(rademacher.path("weights"), tmp_path / "weights.ptd")


@pytest.fixture
def begun_run(rademacher, weights, dataset, run):
    return begun(run.path, rademacher.plan(dataset, **SETTINGS).model_copy(update={"weights": weights}))


@pytest.fixture
def first(begun_run, launcher, tmp_path):
    """Hashes of a run, which left packed weights."""
    return trained(copy_run(begun_run, tmp_path / "first"), launcher)


def files(weights):
    """The packed weights and their index."""
    return Path(f"{weights}.packed"), Path(f"{weights}.packed.index")


def file_states(weights):
    return [(path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files(weights)]


def trained(run, launcher):
    train(run, launcher)
    return hashes(run)


def test_a_second_run_finds_what_the_first_one_packed(begun_run, launcher, weights, first):
    before = file_states(weights)
    assert trained(begun_run, launcher) == first
    assert begun_run.figures().load_seconds > 0
    assert file_states(weights) == before  # nothing was packed again


def test_weights_of_the_program_itself_are_kept_too(weights, first):
    """A, and the transposed weights of 4 bits. The key of such a weight has its first number's highest bit."""
    entries = np.frombuffer(files(weights)[1].read_bytes()[32:], np.uint64).reshape(-1, 6)
    assert 0 < np.count_nonzero(entries[:, 0] >> np.uint64(63)) < len(entries)


def test_a_run_without_a_file_trains_the_same(begun_run, launcher, weights, first):
    for path in files(weights):
        path.unlink()
    Path(f"{weights}.packed").mkdir()  # what cannot be opened as a file
    assert trained(begun_run, launcher) == first


def test_a_disk_that_is_nearly_full_is_left_as_it_is(begun_run, launcher, weights, first, small_disk):
    copy = shutil.copy2(weights, small_disk("60m") / "weights.ptd")
    begun_run.begin(begun_run.plan().model_copy(update={"weights": copy}))
    assert trained(begun_run, launcher) == first
    assert Path(f"{copy}.packed").stat().st_size == 0


def test_what_is_damaged_or_of_another_weights_file_is_replaced(begun_run, launcher, weights, first, tmp_path):
    packed, index = files(weights)
    good = file_states(weights)
    for number, (path, damage) in enumerate(
        [(packed, flip), (packed, cut), (index, flip), (index, cut), (index, foreign), (index, os.unlink)]
    ):
        damage(path)
        run = copy_run(begun_run, tmp_path / f"damaged-{number}")
        assert trained(run, launcher) == first
        assert [content for _, _, content in file_states(weights)] == [content for _, _, content in good]
    before = file_states(weights)
    os.utime(weights, ns=(0, 0))  # another weights file: packed weights are found by their places in it
    assert trained(begun_run, launcher) == first
    assert file_states(weights)[0][0] != before[0][0]


def test_another_process_that_writes_is_left_alone(begun_run, launcher, weights, first, tmp_path):
    with files(weights)[0].open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file_states(weights)
        assert trained(copy_run(begun_run, tmp_path / "reader"), launcher) == first
        files(weights)[1].write_bytes(b"")
        assert trained(begun_run, launcher) == first
        assert [state[0] for state in file_states(weights)] == [state[0] for state in before]
        assert files(weights)[1].read_bytes() == b""


def test_inference_finds_what_was_packed_and_keeps_it_in_memory(rademacher, launcher, weights):
    logits, states = [], []
    for _ in range(2):
        executor = launcher.launch(rademacher.manifest, rademacher.path("inference"), weights, resident=True)
        inference = InferenceSession(rademacher.manifest, executor)
        process = psutil.Process(executor.pid)
        logits.append(inference.extend([1, 2, 3], 0, [2]))
        states.append(file_states(weights))
        resident, size = mapped_pages(process, Path(f"{weights}.packed"))
        inference.close()
    np.testing.assert_array_equal(*logits)
    assert states[0] == states[1]  # nothing was packed again
    assert resident == size > 0  # a token reads all of it, so none is released between two


def mapped_pages(process, path):
    """Resident and mapped bytes of a file in a process."""
    maps = [each for each in process.memory_maps(grouped=False) if each.path == str(path)]
    return sum(each.rss for each in maps), sum(each.size for each in maps)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def foreign(index):
    """Gives an index the identity of another runner or processor, which its second eight bytes are."""
    content = index.read_bytes()
    index.write_bytes(content[:8] + bytes(8) + content[16:])


def cut(path):
    os.truncate(path, path.stat().st_size // 2)
