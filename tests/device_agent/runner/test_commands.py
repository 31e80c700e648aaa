"""The runner's commands, as its clients use them (docs/runner.md)."""

import contextlib
import fcntl
import io
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
from importlib.metadata import version

import numpy as np
import psutil
import pytest

from device_agent.executors.process import FAILED, FILE_LOST, OK, OUT_OF_MEMORY, decode_tensors, encode_tensors
from device_agent.runner.location import EXECUTORCH
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_step

LOADED = b"".join((bytes([OK]), *encode_tensors(())))
SECONDS = 60  # for a process to exit; nothing depends on it unless the test fails


def encode(method, *inputs):
    """Returns the bytes of a request."""
    return b"".join((struct.pack("<I", len(method)), method.encode(), *encode_tensors(inputs)))


def answer(read):
    """Returns the arrays of the next answer, or its status and text if it is an error."""
    if (status := read(1)[0]) == OK:
        return decode_tensors(read)
    (length,) = struct.unpack("<I", read(4))
    return status, read(length).decode()


def finish(process, *requests):
    """Sends requests, reads their answers and closes the input; returns the answers and the exit status.

    Without requests the answer is that to the program's loading.
    """
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"".join(requests))
        process.stdin.flush()
    answers = [answer(process.stdout.read) for _ in requests or ("load",)]
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    assert process.stdout.read() == b""
    return answers, process.wait(SECONDS)


@pytest.fixture
def program_files(rademacher, tmp_path):
    """Copies of a program and its weights, which a test may damage: the options that name them."""
    for role in ("program", "weights"):
        shutil.copy(rademacher.path(role), tmp_path / role)
    return ["--program", tmp_path / "program", "--weights", tmp_path / "weights"]


@pytest.fixture
def runner(runner_directory):
    return runner_directory / "mobizo-runner"


@pytest.fixture
def serve(runner, program_files):
    """Starts the runner on the program; returns its process."""
    processes = []

    def start(stdin=subprocess.PIPE):
        command = [runner, "serve", *program_files]
        processes.append(subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE))
        return processes[-1]

    yield start
    for process in processes:
        with process:
            process.kill()


@pytest.fixture
def served(serve):
    """A process that has loaded its program."""
    process = serve()
    assert process.stdout.read(len(LOADED)) == LOADED
    return process


@pytest.fixture
def step_inputs(rademacher, dataset):
    recipe = rademacher.manifest.recipe
    examples = rademacher.examples(dataset)[: recipe.effective_batch]
    seeds = query_seeds(1, 0, recipe.queries)
    rates = (np.array([value], np.float32) for value in (0.1, 0.01))
    return [*pack_step(examples, recipe), seeds, *rates]


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=SECONDS)


def test_version_says_what_the_runner_is(runner):
    process = run(runner, "version")
    assert process.returncode == 0
    expected = {"version": version("mobizo"), "executorch": EXECUTORCH, "protocol": 1}
    assert json.loads(process.stdout) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a command is missing"),
        (("fly",), "unknown command fly"),
        (("version", "serve"), "unexpected argument serve"),
        (("serve", "--program", "p.pte"), "serve needs --program and --weights"),
        (("serve", "--weights", "w.ptd", "--program"), "option '--program' requires an argument"),
        (("serve", "--what", "p.pte"), "unrecognized option '--what'"),
    ],
)
def test_unusable_arguments_are_named(runner, words, message):
    process = run(runner, *words)
    assert process.returncode == 2
    assert f"mobizo-runner: {message}\n" in process.stderr
    assert "mobizo-runner serve --program" in process.stderr


@pytest.mark.parametrize(
    ("request_bytes", "message"),
    [
        (struct.pack("<I", 65), "a method name of 65 bytes"),
        (struct.pack("<I4sI", 4, b"load", 17), "a number of tensors of 17"),
        (struct.pack("<I4sIB", 4, b"load", 1, 3), "a tensor of the unknown type 3"),
        (struct.pack("<I4sIBI", 4, b"load", 1, 0, 9), "a rank of 9"),
        (struct.pack("<I4sIBII", 4, b"load", 1, 0, 1, 2**31), "a size of 2147483648"),
        (struct.pack("<I4sIBIII", 4, b"load", 1, 0, 2, 2**20, 2**20), "a tensor of more than 4 GiB"),
        (struct.pack("<I4sIBIIII", 4, b"load", 1, 0, 3, 0, 2**20, 2**20), "a tensor of more than 4 GiB"),
    ],
)
def test_a_malformed_request_ends_the_runner(served, request_bytes, message):
    ((code, text),), status = finish(served, request_bytes)
    assert (code, status) == (FAILED, 1)
    assert message in text


def test_a_truncated_request_ends_the_runner(served):
    output, _ = served.communicate(encode("load", np.zeros(9, np.float32))[:-1], SECONDS)
    assert (answer(io.BytesIO(output).read), served.returncode) == ((FAILED, "the request is truncated"), 1)


@pytest.mark.parametrize(
    ("name", "content", "expected", "message"),
    [
        ("program", None, FILE_LOST, "No such file or directory"),
        ("weights", None, FILE_LOST, "No such file or directory"),
        ("weights", b"", FILE_LOST, "it is empty"),
        ("program", bytes(4096), FAILED, "ExecuTorch Error::InvalidProgram"),
        ("program", "half", FAILED, "ExecuTorch Error::"),
        ("weights", "half", FAILED, "ExecuTorch Error::"),
    ],
)
def test_a_program_that_does_not_load_is_answered(serve, tmp_path, name, content, expected, message):
    path = tmp_path / name
    if content == "half":
        os.truncate(path, path.stat().st_size // 2)
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    ((code, text),), status = finish(serve())
    assert (code, status) == (expected, 1)
    assert message in text


def test_lack_of_memory_is_answered(served):
    limit = psutil.Process(served.pid).memory_info().vms + (32 << 20)
    resource.prlimit(served.pid, resource.RLIMIT_AS, (limit, limit))
    request = encode("load", np.zeros(16 << 20, np.float32))
    assert finish(served, request) == ([(OUT_OF_MEMORY, "memory ran out")], 1)


def connected(kind):
    """Returns our and the runner's end of a standard input with room for steps; adbd gives its processes sockets."""
    if kind == "socket":
        return (end.detach() for end in socket.socketpair())
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 1 << 18)
    return ours, theirs


@pytest.mark.parametrize("steps", [0, 40])  # 40: more than a runner computes until its client has gone
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_the_runner_exits_when_its_client_goes_away(serve, step_inputs, kind, steps):
    """With 1 during a call and normally between calls."""
    ours, theirs = connected(kind)
    process = serve(theirs)
    os.close(theirs)
    assert process.stdout.read(len(LOADED)) == LOADED
    os.write(ours, encode("step", *step_inputs) * steps)
    os.close(ours)
    assert process.wait(SECONDS) == (1 if steps else 0)
