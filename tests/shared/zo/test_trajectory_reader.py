"""Uploaded ledgers: every malformed one is rejected with a reason, and no other error is raised."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidTrajectory
from shared.result import Result
from shared.training_settings import TrainingSettings
from shared.trajectory_checks import check_result, check_run, ledger_limit
from shared.zo.trajectory import MAGIC, Evaluation, TrajectoryFile, TrajectoryHeader, frame
from shared.zo.trajectory_reader import MAX_METADATA_FRAMES, read_ledger

HEADER = TrajectoryHeader(job_id="j", job_seed=9, recipe_id="0" * 64, noise="rademacher", queries=2, size=100)
FIRST_BYTES = MAGIC + frame(b"H", 0, HEADER.model_dump_json().encode())
TRAINING = TrainingSettings(steps=6, evaluation_interval=2)


def step(number, values=(0.5, -0.25)):
    return frame(b"S", number, np.array(values, "<f4").tobytes())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a trajectory with steps and evaluations, and the bytes that a device writes for it."""
    path = tmp_path_factory.mktemp("ledger") / "t"
    file = TrajectoryFile(path, HEADER)
    for number in range(6):
        if number % 2 == 0:
            file.append_evaluation(Evaluation(step=number, split="validation", correct=1, total=2, loss=0.5))
        file.append_step(np.array([number, -number], np.float32))
    file.append_evaluation(Evaluation(step=2, split="test", correct=1, total=2, loss=0.5, adapter="best"))
    file.close()
    return file.trajectory, path.read_bytes()


def test_a_written_ledger_is_read(written):
    expected, data = written
    trajectory = read_ledger(data)
    assert trajectory.header == expected.header
    assert np.array_equal(trajectory.coefficients, expected.coefficients)
    assert trajectory.evaluations == expected.evaluations
    assert len(data) <= ledger_limit(TRAINING, 2)
    check_run(trajectory, HEADER, TRAINING)


BAD = {
    "empty": (b"", "not a trajectory"),
    "another format": (b"MOBIZO-TRAJECTORY 2\n", "not a trajectory"),
    "no header": (MAGIC, "no header"),
    "a step first": (MAGIC + step(0), "at its start"),
    "two headers": (FIRST_BYTES + FIRST_BYTES[len(MAGIC) :], "one header"),
    "a gap": (FIRST_BYTES + step(0) + step(2), "step 2 instead of step 1"),
    "twice the same": (FIRST_BYTES + step(0) + step(0), "step 0 instead of step 1"),
    "too few coefficients": (FIRST_BYTES + frame(b"S", 0, bytes(4)), "4 bytes"),
    "too many coefficients": (FIRST_BYTES + frame(b"S", 0, bytes(12)), "12 bytes"),
    "not a number": (FIRST_BYTES + step(0, (np.nan, 0)), "not finite"),
    "infinite": (FIRST_BYTES + step(0, (0, -np.inf)), "not finite"),
    "an unknown kind": (FIRST_BYTES + frame(b"X", 0, b""), "kind b'X'"),
    "torn": ((FIRST_BYTES + step(0))[:-1], "breaks off"),
    "more": (FIRST_BYTES + step(0) + b"\0", "breaks off"),
    "a length over the end": (FIRST_BYTES + struct.pack("<cII", b"S", 0, 2**32 - 1), "breaks off"),
    "a header that is no JSON": (MAGIC + frame(b"H", 0, b"{"), "not of its kind"),
    "a header with more": (
        MAGIC + frame(b"H", 0, json.dumps(HEADER.model_dump() | {"x": 1}).encode()),
        "not of its kind",
    ),
    "a header that nests": (MAGIC + frame(b"H", 0, b"[" * 100_000), "not of its kind"),
    "an evaluation that is none": (FIRST_BYTES + frame(b"E", 0, b'{"step": 0}'), "not of its kind"),
    "limits that are none": (FIRST_BYTES + frame(b"L", 0, b'{"rest": NaN}'), "not of its kind"),
    "an evaluation of later": (FIRST_BYTES + frame(b"E", 3, b"{}"), "step 3 instead of step 0"),
}


def pulled(factor, mu=0.5):
    """Returns header and ledger of one step at rate 0.01 with a pull."""
    header = HEADER.model_copy(update={"proximal": mu})
    return header, MAGIC + frame(b"H", 0, header.model_dump_json().encode()) + step(0, (0.5, -0.25, factor))


def test_a_pull_with_another_factor_than_the_jobs_is_rejected():
    training = TrainingSettings(steps=1, lr=0.01)
    for factor in (0.995, np.nextafter(np.float32(0.995), np.float32(1))):
        header, data = pulled(factor)
        check_run(read_ledger(data), header, training)
    _, data = pulled(0.9951)
    with pytest.raises(InvalidTrajectory, match=r"after step 0 has factor 0\.9951; the job's is 0\.995"):
        check_run(read_ledger(data), header, training)
    with pytest.raises(InvalidTrajectory, match=r"its proximal is 0\.5, this job's None"):
        check_run(read_ledger(data), HEADER, training)
    with pytest.raises(InvalidTrajectory, match="12 bytes are not the 2 numbers"):
        read_ledger(FIRST_BYTES + step(0, (0.5, -0.25, 0.995)))


def test_reading_stops_after_the_maximum_number_of_frames():
    torn = b"?"
    with pytest.raises(InvalidTrajectory, match="it is step 3; the job has 2"):
        read_ledger(FIRST_BYTES + step(0) + step(1) + step(2) + torn, 2)
    with pytest.raises(InvalidTrajectory, match="more than 20000 evaluations and changes of limits"):
        read_ledger(FIRST_BYTES + frame(b"L", 0, b'{"step":0}') * (MAX_METADATA_FRAMES + 1) + torn, 2)
    assert read_ledger(FIRST_BYTES + step(0) + step(1), 2).steps == 2


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_each_kind_of_malformed_ledger(data, message):
    with pytest.raises(InvalidTrajectory, match=message):
        read_ledger(data)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_detected(written, data):
    _, file = written
    changed = bytearray(file)
    changed[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidTrajectory):
        read_ledger(bytes(changed))


frames = st.lists(
    st.tuples(st.sampled_from([b"H", b"S", b"E", b"L", b"\xff"]), st.integers(0, 2**32 - 1), st.binary(max_size=40))
    | st.tuples(st.just(b"S"), st.integers(0, 3), st.binary(min_size=8, max_size=8)),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | frames.map(lambda some: FIRST_BYTES + b"".join(frame(*one) for one in some)))
def test_random_frames_are_rejected_or_parsed(data):
    """The checksums are valid, so only the parser can reject the file."""
    try:
        trajectory = read_ledger(data)
    except InvalidTrajectory:
        return
    assert trajectory.header == HEADER
    assert all(np.isfinite(row).all() and row.shape == (2,) for row in trajectory.coefficients)


@pytest.mark.parametrize("name", ["job_id", "job_seed", "recipe_id", "noise", "queries", "size", "start_sha256"])
def test_another_run_is_named(written, name):
    other = {"job_id": "k", "job_seed": 1, "recipe_id": "1" * 64, "noise": "gaussian", "queries": 3, "size": 1}
    expected = HEADER.model_copy(update={name: other.get(name, "2" * 64)})
    with pytest.raises(InvalidTrajectory, match=name):
        check_run(written[0], expected, TRAINING)


def test_long_header_values_are_truncated_in_errors():
    expected = HEADER.model_copy(update={"job_id": "x" * 10_000})
    with pytest.raises(InvalidTrajectory) as error:
        check_run(read_ledger(MAGIC + frame(b"H", 0, expected.model_dump_json().encode())), HEADER, TRAINING)
    assert len(error.value.detail) < 300


def test_steps_beyond_the_budget(written):
    with pytest.raises(InvalidTrajectory, match="6 steps; the job has 5"):
        check_run(written[0], HEADER, TrainingSettings(steps=5))


def result(steps, best):
    return Result(
        steps=steps,
        best_step=best,
        train_seconds=1,
        seconds=1,
        peak_rss_bytes=1,
        train_examples=1,
        truncated_examples=0,
    )


def test_steps_are_as_reported(written):
    check_result(written[0], result(6, 2))
    with pytest.raises(InvalidTrajectory, match="reports 5"):
        check_result(written[0], result(5, 2))
    with pytest.raises(InvalidTrajectory, match="step 7 of 6"):
        check_result(written[0], result(6, 7))
