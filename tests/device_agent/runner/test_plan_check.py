"""Plans and ledgers with impossible numbers and right checksums: the runner names the record and trains nothing."""

import contextlib
import json
import re
import struct
import subprocess

import numpy as np
import pytest

from device_agent.engines.child_process import prepare
from device_agent.training.plan import MAGIC
from shared.zo.trajectory import frame

SETTINGS = {"steps": 12, "lr": 0.3, "seed": 3, "evaluation_interval": 4}
CONFIGURATION = struct.Struct("<17qd")
STEPS, QUERIES, BATCH, LENGTH, ANSWER, CHOICES, SCORE_ROWS, SIZE = 0, 2, 3, 4, 5, 6, 7, 8  # places in it
WIDTH, STRIDE, VOCABULARY, EPS = 12, 13, 15, 17


def records(data):
    """The kinds and payloads of a plan, without its end."""
    entries, at = [], len(MAGIC)
    while at < len(data):
        kind, _, length = struct.unpack_from("<cII", data, at)
        entries.append((kind, data[at + 9 : at + 9 + length]))
        at += 9 + length + 4
    return entries[:-1]


def dump(entries):
    """A plan of these records, with right checksums and its end."""
    whole = b"".join(frame(kind, count, payload) for count, (kind, payload) in enumerate(entries))
    return MAGIC + whole + frame(b"Z", len(entries), b"")


def without(kind):
    return lambda entries: [record for record in entries if record[0] != kind]


def change_record(kind, change, place=0):
    """Changes the payload of the record at `place` among those of a kind."""

    def apply(entries):
        at = [index for index, record in enumerate(entries) if record[0] == kind][place]
        return [*entries[:at], (kind, change(entries[at][1])), *entries[at + 1 :]]

    return apply


def setting(place, value):
    def change(payload):
        numbers = list(CONFIGURATION.unpack(payload))
        numbers[place] = value
        return CONFIGURATION.pack(*numbers)

    return change_record(b"C", change)


def number(kind, place, value, dtype="<i4"):
    """Sets the number at `place` of a record's payload; a negative place counts from the end."""

    def change(payload):
        numbers = np.frombuffer(payload, dtype).copy()
        numbers[place] = value
        return numbers.tobytes()

    return change_record(kind, change)


def example(place, value):
    """Sets the int32 at `place` after the tokens of the first training example: positions (A,), answers (A,)."""

    def apply(entries):
        payload = next(payload for kind, payload in entries if kind == b"X")
        return number(b"X", 2 + struct.unpack_from("<i", payload)[0] + place, value)(entries)

    return apply


def score_parts(entries):
    """Places, in int32, in the first batch to score: positions (R, A), choices (R, A, C), and the examples' count."""
    settings = CONFIGURATION.unpack(entries[0][1])
    payload = next(payload for kind, payload in entries if kind == b"V")
    rows, answer, choices = settings[SCORE_ROWS], settings[ANSWER], settings[CHOICES]
    positions = 1 + rows * struct.unpack_from("<i", payload)[0]
    first = positions + rows * answer
    return {"positions": positions, "choices": first, "count": first + rows * answer * choices}, payload


def set_score_number(part, place, value):
    """Sets the int32 at `place` of a part of the first batch to score."""
    return lambda entries: number(b"V", score_parts(entries)[0][part] + place, value)(entries)


def twice(entries):
    """The second example to score says that it is the first."""
    places, payload = score_parts(entries)
    first = np.frombuffer(payload, "<i4")[places["count"] + 1]
    return set_score_number("count", 1, first + 1 if first == 0 else 0)(entries)


def longer(payload):
    return payload + b"\0"


HARMS = {
    "no settings": (without(b"C"), "does not begin with its settings"),
    "settings that come late": (
        lambda entries: [entries[1], entries[0], *entries[2:]],
        "does not begin with its settings",
    ),
    "settings that come twice": (lambda entries: [*entries, entries[0]], "does not begin with its settings"),
    "negative steps": (setting(STEPS, -1), "-1 for the number of steps"),
    "no queries": (setting(QUERIES, 0), "0 for the number of queries"),
    "no stride": (setting(STRIDE, 0), "0 for the stride"),
    "a size beyond int32": (setting(SIZE, 1 << 40), "for the size of B"),
    "sizes beyond memory": (setting(BATCH, (1 << 31) - 1), "too short|more numbers than any memory"),
    "a product beyond int64": (
        lambda entries: setting(LENGTH, (1 << 31) - 1)(setting(BATCH, (1 << 31) - 1)(entries)),
        "more numbers than any memory",
    ),
    "a width beyond memory": (setting(WIDTH, (1 << 31) - 1), "bytes a step, more than this machine has"),
    "no header": (without(b"H"), "no header"),
    "no lr": (without(b"L"), "0 numbers of `lr` where 12 belong"),
    "a short lr": (change_record(b"L", lambda payload: payload[:-4]), "too short"),
    "no seeds": (without(b"Q"), "0 numbers of `seeds` where 48 belong"),
    "no order": (without(b"O"), "0 numbers of `order` where 48 belong"),
    "a short order": (change_record(b"O", lambda payload: payload[:-4]), "too short"),
    "an example that is not there": (number(b"O", 5, 13), "training example 13, but has only 13"),
    "a negative example": (number(b"O", 5, -1), "training example -1, but has only 13"),
    "no examples": (without(b"X"), "training example .*, but has only 0"),
    "more tokens than the record": (number(b"X", 0, -1), "too short"),
    "an opening beyond the example": (number(b"X", 1, 1000), "1000 for the opening of an example"),
    "a sequence length below the examples": (setting(LENGTH, 3), "for the length of an example"),
    "nothing to choose B by": (without(b"V"), "no validation split"),
    "more scored examples than the record": (set_score_number("count", 0, -1), "too short"),
    "a scored example that is not there": (set_score_number("count", 1, 1000), "scored example 1000, but has only 9"),
    "an example that is scored twice": (twice, "scores example . twice"),
    "a candidate that is not there": (set_score_number("count", 2, 7), "right candidate 7, but has only 2"),
    "more candidates than the record": (set_score_number("count", 3, 1 << 30), "too short"),
    "more cells than the record": (set_score_number("count", 4, 1 << 30), "too short"),
    "a row that is not there": (set_score_number("count", 5, 4096), "score row 4096, but has only"),
    "a negative position": (set_score_number("count", 6, -1), "score position -1, but has only 6"),
    "a choice that is not there": (set_score_number("count", 7, 2), "score candidate 2, but has only 2"),
    "a token outside the vocabulary": (number(b"X", 2, 288), "token 288, but has only 288"),
    "a negative token": (number(b"X", 2, -1), "token -1, but has only 288"),
    "an answer outside the vocabulary": (example(6, 1 << 30), "token 1073741824, but has only 288"),
    "a token to score outside the vocabulary": (number(b"V", 1, 288), "token 288, but has only 288"),
    "a candidate's token outside the vocabulary": (set_score_number("choices", 0, -1), "token -1, but has only 288"),
    "a position to score outside the sequence": (
        set_score_number("positions", 0, 4096),
        "score position 4096, but has only",
    ),
    "an empty vocabulary": (setting(VOCABULARY, 0), "0 for the size of the vocabulary"),
    "an answer before the first one": (
        lambda entries: number(b"X", -5, 1, "<f4")(example(1, 0)(entries)),
        "answer positions out of order",
    ),
    "a position without an answer": (example(5, 1), "answer positions out of order"),
    "an eps that is not finite": (setting(EPS, float("nan")), "a value of eps that is not finite"),
    "an lr that is not finite": (number(b"L", 3, np.inf, "<f4"), "a value of `lr` that is not finite"),
    "settings that are too long": (change_record(b"C", longer), "too long"),
    "a long lr": (change_record(b"L", longer), "too long"),
    "a long example": (change_record(b"X", longer), "too long"),
    "a long batch to score": (change_record(b"V", longer), "too long"),
    "a bound of the norm that is no number": (
        lambda entries: [*entries, (b"M", struct.pack("<i", 1)), (b"G", struct.pack("<ff", np.nan, 0.0))],
        "nan for the bound of the gradient's norm",
    ),
    "no steps between checkpoints": (
        lambda entries: [*entries, (b"M", struct.pack("<i", 0))],
        "0 for the steps between checkpoints",
    ),
    "a record of a later version": (lambda entries: [*entries, (b"?", b"")], "a record of another version"),
}


@pytest.fixture
def begun(rademacher, dataset, run):
    run.begin(rademacher.plan(dataset, **SETTINGS))
    assert prepare(run) is None
    return run


@pytest.fixture
def refusal(rademacher, begun, runner_directory):
    """The error with which the runner refuses the run."""

    def train():
        command = [runner_directory / "mobizo-runner", "train", "--run", begun.path]
        command += ["--program", rademacher.path("program"), "--weights", rademacher.path("weights")]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert process.returncode == 1, process.stderr
        error = json.loads(process.stdout.splitlines()[-1])["error"]
        assert error["code"] == "runtime-failed"
        return error["detail"]

    return train


def test_a_ledger_of_more_steps_than_the_run_is_refused(begun, refusal):
    with contextlib.closing(begun.open_trajectory(begun.plan())) as ledger:
        for _ in range(SETTINGS["steps"] + 1):
            ledger.append_step(np.zeros(2, np.float32))
    assert "has more steps than the run" in refusal()


def test_impossible_numbers_of_a_plan_are_refused(begun, refusal):
    whole, wrong = records(begun.native_plan.read_bytes()), {}
    for name, (harm, expected) in HARMS.items():
        begun.native_plan.write_bytes(dump(harm(whole)))
        detail = refusal()
        if not re.search(expected, detail):
            wrong[name] = detail
    assert wrong == {}
    assert not begun.ledger.exists()


EVALUATION = {"step": 0, "split": "validation", "correct": 1, "total": 9, "loss": 1.0, "adapter": "current"}
LIMITS = {"step": 0, "rest": 0.5, "max_length": None}
FRAMES = {
    b"E": [
        *({"step": 7}, {"step": -1}, {"correct": 10}, {"correct": -1}, {"step": 1 << 64}, {"loss": float("inf")}),
        *({"split": "train"}, {"adapter": "x"}, '{"total": 0}', '{"total":'),
    ],
    b"L": [
        *({"step": -1}, {"rest": -1}, {"rest": float("inf")}, {"max_length": -4}, {"max_length": 1 << 64}),
        *("{}", "[" * 100_000),
    ],
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind, changes in FRAMES.items() for change in changes],
    ids=lambda value: str(value)[:30],
)
def test_impossible_frames_of_a_ledger_are_refused(begun, refusal, kind, change):
    whole, message = {b"E": (EVALUATION, "impossible evaluation"), b"L": (LIMITS, "impossible limits")}[kind]
    begun.open_trajectory(begun.plan()).close()
    with begun.ledger.open("ab") as ledger:
        ledger.write(frame(kind, 0, (change if isinstance(change, str) else json.dumps(whole | change)).encode()))
    assert message in refusal()
