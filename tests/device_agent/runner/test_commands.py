"""The runner's commands, as its clients use them (docs/runner.md)."""

import fcntl
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
from shared.zo.encoding import pack_step
from shared.zo.noise import query_seeds

SECONDS = 60  # for a process to exit; nothing depends on it unless the test fails


def encode(method, *inputs):
    """Returns the bytes of a request."""
    return b"".join((struct.pack("<I", len(method)), method.encode(), *encode_tensors(inputs)))


class Client:
    """A runner that serves a program, and its pipes."""

    def __init__(self, command, **options):
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | options
        self.process = subprocess.Popen(command, bufsize=0, **options)

    def send(self, data):
        rest = memoryview(data)
        while rest:
            rest = rest[self.process.stdin.write(rest) :]

    def read(self, size):
        data = b""
        while len(data) < size:
            piece = self.process.stdout.read(size - len(data))
            assert piece, f"the runner ended with status {self.process.wait(SECONDS)}"
            data += piece
        return data

    def answer(self):
        """Returns the arrays of the next answer, or its status and text if it is an error."""
        status = self.read(1)[0]
        if status == OK:
            return decode_tensors(self.read)
        (length,) = struct.unpack("<I", self.read(4))
        return status, self.read(length).decode()

    def call(self, method, *inputs):
        self.send(encode(method, *inputs))
        return self.answer()

    def end(self):
        """Closes the runner's input; returns its exit status and checks that no output is left."""
        self.process.stdin.close()
        assert self.process.stdout.read() == b""
        return self.process.wait(SECONDS)

    def close(self):
        """Kills the runner if it still runs."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


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
    """Starts the runner on the program; returns a client. `words`: more options."""
    clients = []

    def start(*words, **options):
        clients.append(Client([runner, "serve", *program_files, *words], **options))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def served(serve):
    """A client whose program is loaded."""
    client = serve()
    assert client.answer() == []
    return client


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
        (("serve", "--program", "p.pte"), "option --weights is missing"),
        (("serve", "--weights", "w.ptd", "--program"), "option --program needs a value"),
        (("serve", "--what", "p.pte"), "unknown option --what"),
    ],
)
def test_unusable_arguments_are_named(runner, words, message):
    process = run(runner, *words)
    assert process.returncode == 2
    assert process.stderr.startswith(f"mobizo-runner: {message}\n")
    assert "mobizo-runner serve --program" in process.stderr


def test_arguments_may_come_in_any_order(runner, program_files, tmp_path):
    words = ["--resident", *program_files[2:], "--packed", tmp_path / "packed", "serve", *program_files[:2]]
    client = Client([runner, *words])
    assert client.answer() == []
    assert client.end() == 0
    client.close()


def test_a_method_is_called_until_the_input_ends(served, rademacher):
    size = rademacher.manifest.size
    assert not served.call("adapter")[0].any()
    flat = np.random.default_rng(1).normal(0, 0.1, size).astype(np.float32)
    served.call("load", flat)
    np.testing.assert_array_equal(served.call("adapter")[0], flat)
    assert served.end() == 0


@pytest.mark.parametrize(
    ("method", "inputs", "message"),
    [
        ("fly", [], "the program has no method 'fly'"),
        ("load", [np.zeros(3, np.int64)], "method 'load' failed (ExecuTorch Error::InvalidArgument)"),
        ("load", [np.zeros(3, np.float32)], "method 'load' failed (ExecuTorch Error::"),
        ("load", [], "method 'load' failed (ExecuTorch Error::"),
    ],
)
def test_a_call_that_fails_is_answered_and_the_next_one_succeeds(served, method, inputs, message):
    status, text = served.call(method, *inputs)
    assert (status, text[: len(message)]) == (FAILED, message)
    assert len(served.call("adapter")) == 1
    assert served.end() == 0


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
    served.send(request_bytes)
    status, text = served.answer()
    assert status == FAILED
    assert message in text
    assert served.process.wait(SECONDS) == 1


def test_a_truncated_request_ends_the_runner(served):
    served.send(encode("load", np.zeros(9, np.float32))[:-1])
    served.process.stdin.close()
    assert served.answer() == (FAILED, "the request is truncated")
    assert served.process.wait(SECONDS) == 1


@pytest.mark.parametrize(
    ("name", "content", "expected", "message"),
    [
        ("program", None, FILE_LOST, "No such file or directory"),
        ("weights", None, FILE_LOST, "No such file or directory"),
        ("weights", b"", FILE_LOST, "it is empty"),
        ("program", bytes(4096), FAILED, "ExecuTorch Error::InvalidProgram"),
    ],
)
def test_a_program_that_does_not_load_is_answered(serve, tmp_path, name, content, expected, message):
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    client = serve()
    status, text = client.answer()
    assert status == expected
    assert message in text
    assert client.process.wait(SECONDS) == 1


@pytest.mark.parametrize("name", ["program", "weights"])
def test_a_file_that_was_truncated_before_does_not_load(serve, tmp_path, name):
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    status, text = serve().answer()
    assert status == FAILED
    assert "ExecuTorch Error::" in text


def test_a_file_that_is_truncated_during_use_is_unreadable(served, step_inputs, tmp_path):
    os.truncate(tmp_path / "weights", 0)
    status, text = served.call("step", *step_inputs)
    assert (status, text) == (FILE_LOST, "a file of the program was truncated or cannot be read")
    assert served.process.wait(SECONDS) == 1


def test_lack_of_memory_is_answered(served):
    pid = served.process.pid
    resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + (32 << 20),) * 2)
    with pytest.raises(BrokenPipeError):
        served.send(encode("load", np.zeros(16 << 20, np.float32)))
    assert served.answer() == (OUT_OF_MEMORY, "memory ran out")
    assert served.process.wait(SECONDS) == 1


@pytest.fixture
def steps(step_inputs):
    """Requests for more steps than a runner computes while it notices that its client is gone."""
    return encode("step", *step_inputs) * 40


def connected(kind):
    """Returns our and the runner's end of a standard input with room for `steps`; adbd gives its processes sockets."""
    if kind == "socket":
        return (end.detach() for end in socket.socketpair())
    theirs, ours = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 1 << 18)
    return ours, theirs


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_the_runner_exits_during_a_call_when_its_client_goes_away(serve, steps, kind):
    ours, theirs = connected(kind)
    client = serve(stdin=theirs)
    os.close(theirs)
    assert client.answer() == []
    os.write(ours, steps)
    os.close(ours)
    assert client.process.wait(SECONDS) == 1  # 0 if it had computed all steps


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_the_runner_ends_normally_between_calls(serve, kind):
    ours, theirs = connected(kind)
    client = serve(stdin=theirs)
    os.close(theirs)
    assert client.answer() == []
    os.close(ours)
    assert client.process.wait(SECONDS) == 0
