"""The client of executor processes: whatever a process does, the caller gets one clear error and no process is left.

The processes are short Python scripts that speak the protocol, well or badly, and the real executors of this machine.
"""

import errno
import io
import struct
import subprocess
import sys
from contextlib import closing

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from device_agent.errors import DoesNotFit, ExecutorEnded, ProgramFileLost, RuntimeFailed, Stopped
from device_agent.executors import process as executor_process
from device_agent.executors.process import (
    FAILED,
    FILE_LOST,
    MAX_TENSORS,
    OK,
    OUT_OF_MEMORY,
    TYPES,
    ExecutorProcess,
    decode_tensors,
    encode_tensors,
)
from device_agent.executors.program import TrainingProgram
from device_agent.executors.python_process import serve
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_score, pack_step
from tests.device_agent.native import ROOT

LOADED = b"".join((bytes([OK]), *encode_tensors(())))
SCRIPT = f"""
import os, signal, struct, sys, time
def answer(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
def request(size):
    return sys.stdin.buffer.read(size)
LOADED = {LOADED!r}
REQUEST = 4 + len("call") + 4
"""


@pytest.fixture
def start():
    """Starts a script as an executor; after the test nothing of it runs."""
    started = []

    def start(script, **options):
        before = set(psutil.Process().children())
        try:
            started.append(ExecutorProcess([sys.executable, "-c", SCRIPT + script], "the program", **options))
            return started[-1]
        finally:
            start.processes = set(psutil.Process().children()) - before

    yield start
    for each in started:
        each.close()
    assert not any(each.is_running() for each in start.processes)


def error_answer(status, text):
    return bytes([status]) + struct.pack("<I", len(text)) + text


def test_a_process_that_does_not_start_is_named(tmp_path):
    with pytest.raises(ExecutorEnded, match=r"does not start.*install mobizo-runner"):
        ExecutorProcess([str(tmp_path / "absent")], "the program")


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("print('SECRET', file=sys.stderr); sys.exit(3)", ExecutorEnded, "ended with status 3: SECRET"),
        ("os.kill(os.getpid(), signal.SIGKILL)", DoesNotFit, "probably out of memory; the run will resume"),
        ("os.kill(os.getpid(), signal.SIGBUS)", ProgramFileLost, "checked and downloaded again"),
        (
            f"answer({error_answer(FAILED, b'no delegate')!r})",
            RuntimeFailed,
            r"the program does not load \(no delegate",
        ),
        (f"answer({error_answer(OUT_OF_MEMORY, b'no memory')!r})", DoesNotFit, "no memory"),
        (f"answer({error_answer(FILE_LOST, b'it was cut')!r})", ProgramFileLost, "it was cut"),
    ],
)
def test_an_executor_that_ends_while_it_loads_or_in_a_call_says_why(start, script, error, words):
    with pytest.raises(error, match=words) as loading:
        start(script)
    executor = start(f"answer(LOADED)\nrequest(REQUEST)\n{script}")
    with pytest.raises(error, match=words.replace("the program does not load", "method 'call' of the program stopped")):
        executor.call("call", ())
    assert "SECRET" not in getattr(loading.value, "public", "")


MALFORMED = {
    "status": error_answer(9, b""),
    "text": bytes([FAILED]) + struct.pack("<I", 1 << 21),
    "count": bytes([OK]) + struct.pack("<I", MAX_TENSORS + 1),
    "type": bytes([OK]) + struct.pack("<IBI", 1, 7, 0),
    "rank": bytes([OK]) + struct.pack("<IBI", 1, 0, 9),
    "size": bytes([OK]) + struct.pack("<IBIII", 1, 0, 2, 1 << 31, 1 << 31),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_or_oversized_answer_is_refused(start, name):
    executor = start(f"answer(LOADED)\nrequest(REQUEST)\nanswer({MALFORMED[name]!r})\nrequest(1)")
    with pytest.raises(ExecutorEnded, match="malformed answer"):
        executor.call("call", ())
    assert not psutil.wait_procs(start.processes, 10)[1]


def test_a_truncated_answer_is_the_end_of_its_process(start):
    whole = b"".join((bytes([OK]), *encode_tensors([np.zeros(9, np.float32)])))
    executor = start(f"answer(LOADED)\nrequest(REQUEST)\nanswer({whole[:-1]!r})")
    with pytest.raises(ExecutorEnded, match="ended with status 0"):
        executor.call("call", ())
    with pytest.raises(ExecutorEnded, match="ended with status 0"):
        executor.call("call", ())


def test_what_a_process_writes_to_standard_error_holds_it_up_never(start):
    executor = start("sys.stderr.write('x' * (1 << 20)); answer(LOADED); request(REQUEST); answer(LOADED); request(1)")
    assert executor.call("call", ()) == []


def test_a_call_that_ends_soon_after_a_stop_gives_its_answer(start):
    stops = []
    script = "answer(LOADED); request(REQUEST); time.sleep(1); answer(LOADED); request(1)"
    executor = start(script, stop=lambda: bool(stops))
    stops.append(True)
    assert executor.call("call", ()) == []


@pytest.mark.parametrize("moment", ["loading", "call", "request"])
def test_a_long_call_is_stopped_after_its_grace(start, monkeypatch, moment):
    """Also one whose process does not read the request, which is larger than a pipe holds."""
    monkeypatch.setattr(executor_process, "GRACE_SECONDS", 0.1)
    stops = [True] if moment == "loading" else []
    with pytest.raises(Stopped):  # noqa: PT012
        executor = start(f"{'' if stops else 'answer(LOADED)'}\ntime.sleep(600)", stop=lambda: bool(stops))
        stops.append(True)
        executor.call("call", [np.zeros(1 << 20, np.float32)] if moment == "request" else ())
    assert not psutil.wait_procs(start.processes, 10)[1]


def test_a_process_that_ignores_the_end_of_its_input_is_killed(start, monkeypatch):
    monkeypatch.setattr(executor_process, "END_SECONDS", 0.1)
    start("answer(LOADED)\ntime.sleep(600)").close()
    (process,) = start.processes
    assert not process.is_running()


BUSY = """

from device_agent.executors import python_process
class Busy:
    def call(self, method, inputs):
        time.sleep(600)
python_process.open_executor = lambda *_, **__: Busy()
python_process.main()
"""


def test_a_python_executor_ends_with_its_agent_within_a_call():
    """tests/device_agent/runner has the same of the native runner."""
    command = [sys.executable, "-c", BUSY, "xnnpack", "p", "w"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.read(len(LOADED)) == LOADED
    process.stdin.write(struct.pack("<I4sI", 4, b"step", 0))
    process.stdin.close()
    assert process.wait(30) != 0
    process.stdout.close()


@pytest.mark.parametrize("launcher", ["native", "python"], indirect=True)
def test_alternating_steps_and_scores_gathers_no_memory(launcher, rademacher, dataset):
    program, recipe = rademacher, rademacher.manifest.recipe
    examples = program.examples(dataset)
    step, score = pack_step(examples[: recipe.effective_batch], recipe), next(iter(pack_score(examples, recipe)))
    with closing(TrainingProgram(program.manifest, launcher.launch(program.manifest, *program.files))) as runtime:

        def alternate(times):
            for number in range(times):
                runtime.score(score.inputs)
                runtime.step(step, query_seeds(5, number, recipe.queries), 0.05, 0.01)

        alternate(20)
        before = runtime.usage().rss_bytes
        alternate(150)
        # Methods loaded and unloaded within one program would leave 60 KB each behind, 18 MB in all.
        assert runtime.usage().rss_bytes - before < 4 << 20


TENSORS = st.sampled_from(TYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3))
)


@given(st.lists(TENSORS, max_size=MAX_TENSORS))
def test_tensors_come_back_as_they_were(tensors):
    decoded = decode_tensors(io.BytesIO(b"".join(encode_tensors(tensors))).read)
    assert len(decoded) == len(tensors)
    for ours, theirs in zip(decoded, tensors, strict=True):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


class Failing:
    """An executor whose calls raise."""

    def __init__(self, error):
        self.error = error

    def call(self, _method, _inputs):
        raise self.error


def answers(requests, open_it):
    output = io.BytesIO()
    return serve(open_it, io.BytesIO(requests), output), output.getvalue()


REQUEST = struct.pack("<I4sI", 4, b"step", 0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeFailed("x"), FAILED),
        (MemoryError("x"), OUT_OF_MEMORY),
        (OSError(errno.EIO, "x"), FILE_LOST),
        (OSError(errno.EACCES, "x"), FAILED),
    ],
)
def test_a_python_executor_answers_errors_and_goes_on(error, status):
    def fail():
        raise error

    text = str(getattr(error, "detail", error)).encode()
    assert answers(REQUEST, fail) == (1, error_answer(status, text))
    assert answers(2 * REQUEST, lambda: Failing(error)) == (0, LOADED + 2 * error_answer(status, text))
