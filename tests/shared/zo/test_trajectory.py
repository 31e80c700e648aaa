import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Conflict
from shared.zo.noise import query_seeds, rademacher
from shared.zo.trajectory import MAGIC, Evaluation, TrajectoryFile, TrajectoryHeader, parse_trajectory

HEADER = TrajectoryHeader(job_id="j", job_seed=9, recipe_id="0" * 64, noise="rademacher", queries=3, size=200)


def record(path, steps=5):
    rng = np.random.default_rng(0)
    file = TrajectoryFile(path, HEADER)
    for step in range(steps):
        file.append_step(rng.normal(size=3).astype(np.float32))
        if step == 2:
            file.append_evaluation(Evaluation(step=3, split="validation", correct=7, total=10, loss=0.5))
    file.close()
    return file.trajectory


def test_replay_is_algorithm_1s_update_in_float32(tmp_path):
    trajectory = record(tmp_path / "t")
    start = np.random.default_rng(1).normal(size=200).astype(np.float32)
    expected = start.copy()
    for step, coefficients in enumerate(trajectory.coefficients):
        for seed, c in zip(query_seeds(9, step, 3).tolist(), coefficients, strict=True):
            for j, sign in enumerate(rademacher(tuple(seed), 200)):
                expected[j] = np.float32(expected[j] - c) if sign > 0 else np.float32(expected[j] + c)
    assert trajectory.replay(start).tobytes() == expected.tobytes()
    assert np.array_equal(trajectory.replay(start, 0), start)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), junk=st.binary(max_size=40))
def test_an_incomplete_last_frame_is_cut_and_the_run_resumes(tmp_path_factory, cut, junk):
    path = tmp_path_factory.mktemp("torn") / "t"
    trajectory = record(path)
    data = path.read_bytes()
    kept = data[: max(len(data) - cut, 0)]
    # Other bytes in place of the magic or the header are no crash; the next test has them.
    path.write_bytes(kept + junk if parse_trajectory(kept)[0] is not None else kept)
    file = TrajectoryFile(path, HEADER)
    done = file.trajectory.steps
    assert np.array_equal(file.trajectory.coefficients, trajectory.coefficients[:done])
    for coefficients in trajectory.coefficients[done:]:
        file.append_step(coefficients)
    file.close()
    restored, _ = parse_trajectory(path.read_bytes())
    assert np.array_equal(restored.coefficients, trajectory.coefficients)


def test_a_ledger_with_a_damaged_beginning_is_refused_and_unchanged(tmp_path):
    """Its steps would be lost if the file were cut; only an empty file and a part of the magic are a new run's."""
    record(tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    header = len(MAGIC) + 20
    for damaged in (
        b"X" + data[1:],
        b"MOBIZO-TRAJECTORY 2\n" + data[len(MAGIC) :],
        data[:header] + bytes([data[header] ^ 1]) + data[header + 1 :],
        b"\0" * len(MAGIC),
    ):
        (tmp_path / "t").write_bytes(damaged)
        with pytest.raises(Conflict, match="move it away to restart the run"):
            TrajectoryFile(tmp_path / "t", HEADER)
        assert (tmp_path / "t").read_bytes() == damaged
    for length in (0, 1, len(MAGIC), header):
        (tmp_path / "t").write_bytes(data[:length])
        file = TrajectoryFile(tmp_path / "t", HEADER)
        assert file.trajectory.steps == 0
        file.close()


def test_a_full_disk_leaves_no_partial_frame(tmp_path, monkeypatch):
    """fsync fails as on a full disk; the next append must follow a complete frame."""
    file = TrajectoryFile(tmp_path / "t", HEADER)
    file.append_step(np.ones(3, np.float32))

    def raise_full_disk(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shared.zo.trajectory.os.fsync", raise_full_disk)
        with pytest.raises(OSError, match="No space"):
            file.append_step(np.ones(3, np.float32))
    file.append_step(np.full(3, 2, np.float32))
    file.close()
    trajectory, _ = parse_trajectory((tmp_path / "t").read_bytes())
    assert np.array_equal(trajectory.coefficients, [[1, 1, 1], [2, 2, 2]])


def test_steps_out_of_order_are_no_crash_but_a_conflict(tmp_path):
    record(tmp_path / "t", steps=1)
    data = (tmp_path / "t").read_bytes()
    frames = data[len(MAGIC) :]
    step = frames[-(9 + 12 + 4) :]
    with pytest.raises(Conflict, match="step 0 instead of step 1"):
        parse_trajectory(data + step)
