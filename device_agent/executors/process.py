"""The client of an executor process, which serves a program's methods over its standard input and output.

The process first sends an answer, with no tensors once the program is loaded. A request is the length of a method's
name (uint32), the name, and tensors. An answer is a status (uint8); after OK come tensors, after every other status the
length of a text (uint32) and the text. Tensors are their count (uint32), then for each its type (uint8: 0 float32,
1 int64, 2 int32), its rank (uint32), its sizes (uint32 each) and its bytes, all little-endian. The method USAGE is the
process's own. The process exits when its standard input ends.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from device_agent.errors import DoesNotFit, ExecutorEnded, ProgramFileLost, RuntimeFailed, Stopped
from device_agent.executors import ExecutorUsage
from shared.errors import MobizoError
from shared.program import ProgramManifest
from shared.stop_signal import never

TYPES = (np.dtype("<f4"), np.dtype("<i8"), np.dtype("<i4"))
OK, FAILED, OUT_OF_MEMORY, FILE_LOST = range(4)  # statuses
USAGE = "$usage"  # int64 (3,): resident bytes, peak resident bytes, microseconds spent loading methods
MAX_TENSORS, MAX_RANK, MAX_TENSOR_BYTES, MAX_TEXT_BYTES = 16, 8, 1 << 32, 1 << 20
POLL_MILLISECONDS = 200  # between two checks whether to stop
GRACE_SECONDS = 10.0  # for the current call to end after `stop`; then the process is killed
END_SECONDS = 5.0  # for the process to exit after its input ends
TAIL_BYTES = 300  # of standard error in a message

_NUMBER = struct.Struct("<I")
_ERRORS = {OUT_OF_MEMORY: DoesNotFit, FILE_LOST: ProgramFileLost}


def encode_tensors(tensors: Sequence[NDArray[Any]]) -> list[bytes]:
    """Returns the bytes of tensors in pieces. Raises ValueError for a type that the protocol lacks."""
    pieces = [_NUMBER.pack(len(tensors))]
    for array in tensors:
        kind = TYPES.index(array.dtype.newbyteorder("<"))
        pieces.append(struct.pack(f"<BI{array.ndim}I", kind, array.ndim, *array.shape))
        pieces.append(np.ascontiguousarray(array, TYPES[kind]).tobytes())
    return pieces


def decode_tensors(read: Callable[[int], bytes | bytearray]) -> list[NDArray[Any]]:
    """Returns tensors from `read`, which returns exactly as many bytes as it is asked for.

    Raises ValueError for tensors beyond the protocol's bounds.
    """
    (count,) = _NUMBER.unpack(read(4))
    if count > MAX_TENSORS:
        raise ValueError(f"{count} tensors")
    return [_tensor(read) for _ in range(count)]


def _tensor(read: Callable[[int], bytes | bytearray]) -> NDArray[Any]:
    kind, rank = struct.unpack("<BI", read(5))
    if kind >= len(TYPES) or rank > MAX_RANK:
        raise ValueError(f"a tensor of type {kind} and rank {rank}")
    shape = struct.unpack(f"<{rank}I", read(4 * rank))
    size = TYPES[kind].itemsize
    for extent in shape:
        size *= extent
        if size > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor of shape {shape}")
    return np.frombuffer(bytearray(read(size)), TYPES[kind]).reshape(shape)


def explain_end(status: int | None, tail: str) -> MobizoError:
    """Returns the error of a process that ended by itself. status: as subprocess has it. tail: of standard error."""
    if status == -signal.SIGKILL:
        return DoesNotFit("the executor was killed, probably out of memory; the run will resume")
    if status == -signal.SIGBUS:
        return ProgramFileLost()
    ended = f"the executor ended with status {status}"
    return ExecutorEnded(f"{ended}: {tail}" if tail else ended, public=ended)


class ExecutorProcess:
    """A program in an executor process; see `device_agent.executors.Executor`."""

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        stop: Callable[[], bool] = never,
        explain: Callable[[int | None, str], MobizoError] = explain_end,
    ) -> None:
        """Starts `command` and waits until the program is loaded. name: of the program, for errors.

        explain: returns the error to raise when the process ended by itself.
        Raises RuntimeFailed, ExecutorEnded, DoesNotFit, ProgramFileLost, Stopped, and what `explain` returns.
        """
        self._name, self._stop, self._explain = name, stop, explain
        self._deadline: float | None = None  # set once `stop` returned true
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches the agent alone, which decides what it means
            )
        except OSError as error:
            self._log.close()
            raise ExecutorEnded(f"the executor does not start ({error}); install mobizo-runner again") from error
        self._input, self._output = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            self._answer("{} does not load")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id; of `adb` for an executor on a phone."""
        return self._process.pid

    def call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the outputs of a method; see `Executor.call`."""
        encoded = method.encode()
        self._write(b"".join((_NUMBER.pack(len(encoded)), encoded, *encode_tensors(inputs))))
        return self._answer(f"method {method!r} of {{}} stopped")

    def usage(self) -> ExecutorUsage:
        """Returns the memory and load time of the process."""
        rss, peak, microseconds = map(int, self.call(USAGE, ())[0])
        return ExecutorUsage(rss, peak, microseconds / 1e6)

    def close(self) -> None:
        """Ends the process: by closing its input, or by a kill if it does not exit."""
        self._input.close()
        try:
            self._process.wait(0 if self._deadline is not None else END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._log.close()

    def _answer(self, failed: str) -> list[NDArray[Any]]:
        """Reads an answer. failed: what an error of the program means, with {} for the program's name."""
        status = self._read(1)[0]
        try:
            if status == OK:
                return decode_tensors(self._read)
            (length,) = _NUMBER.unpack(self._read(4))
            if status > FILE_LOST or length > MAX_TEXT_BYTES:
                raise ValueError(f"status {status} with {length} bytes")
        except ValueError as error:
            self._process.kill()
            raise ExecutorEnded(f"the executor of {self._name} sent a malformed answer ({error})") from error
        text = self._read(length).decode(errors="replace")
        if status in _ERRORS:
            raise _ERRORS[status](text)
        what = failed.format(self._name)
        raise RuntimeFailed(f"{what} ({text})", public=what)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            self._wait(self._output, select.POLLIN)
            count = os.readv(self._output.fileno(), [rest])
            if count == 0:
                raise self._ended()
            rest = rest[count:]
        return data

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                self._wait(self._input, select.POLLOUT)
                rest = rest[os.write(self._input.fileno(), rest) :]
        except (OSError, ValueError) as error:
            raise self._ended() from error

    def _wait(self, pipe: IO[bytes], event: int) -> None:
        """Waits until a pipe is ready. Kills the process and raises Stopped GRACE_SECONDS after `stop` is true."""
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(POLL_MILLISECONDS):
            if self._deadline is None and self._stop():
                self._deadline = time.monotonic() + GRACE_SECONDS
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._process.kill()
                raise Stopped

    def _ended(self) -> MobizoError:
        """Returns the error of a process that closed its pipes."""
        try:
            status: int | None = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = None
        self._log.seek(0)
        tail = self._log.read()[-TAIL_BYTES:].decode(errors="replace").strip()
        return self._explain(status, tail)


class Launcher(ABC):
    """Starts executors of one kind."""

    name: str

    def launch(
        self,
        manifest: ProgramManifest,
        program: Path,
        weights: Path,
        *,
        resident: bool = False,
        stop: Callable[[], bool] = never,
    ) -> ExecutorProcess:
        """Starts an executor that has loaded `program` with the base weights at `weights`.

        resident: everything stays in memory, for inference; training releases what it has used. stop: asked several
        times a second during each call, which then raises Stopped. Raises RuntimeFailed if the program cannot be
        loaded, DoesNotFit, and Unavailable if the executor's device is away for now.
        """
        command = self.command(manifest, program, weights, resident, stop)
        return ExecutorProcess(command, program_name(manifest), stop=stop, explain=self.explain)

    @abstractmethod
    def command(
        self, manifest: ProgramManifest, program: Path, weights: Path, resident: bool, stop: Callable[[], bool]
    ) -> list[str]:
        """Returns the command that `launch` starts. Raises like `launch`."""

    def explain(self, status: int | None, tail: str) -> MobizoError:
        """Returns the error of an executor that ended by itself; see `explain_end`."""
        return explain_end(status, tail)


def program_name(manifest: ProgramManifest) -> str:
    """Returns how errors name a program."""
    return f"the program of recipe {manifest.recipe_id[:12]}, compiled for ExecuTorch {manifest.executorch},"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # noqa: S101  # Popen made it
    os.set_blocking(pipe.fileno(), False)
    return pipe
