"""Programs run by the native runner as another process: their methods asked for over its pipes. Imports no torch.

The process is `mobizo-runner serve` (device_agent/runner/serve.hpp has the form of what is said), here or on a phone.
Knows no data set and no journal.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.runtimes import F32
from device_agent.runtimes.methods import CallingRuntime
from shared.program import TOKEN_DTYPE, ProgramManifest

TYPES = (np.dtype("<f4"), np.dtype("<i8"), np.dtype("<i4"))
END_SECONDS = 5.0  # from the end of its input to its end

_NUMBER = struct.Struct("<I")


def serve_command(runner: Path, program: Path, weights: Path) -> list[str]:
    """The command that serves a program on this machine. runner: the directory of the runner."""
    return [str(runner / "mobizo-runner"), "serve", "--program", str(program), "--weights", str(weights)]


class Served:
    """A program in a runner of its own."""

    def __init__(self, command: Sequence[str], what: str) -> None:
        """Starts the runner and waits until the program is loaded. what: for errors. Raises RuntimeFailed."""
        self._what = what
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise RuntimeFailed(f"the runner does not start ({error}); `mobizo-agent build-runner` makes it") from error
        try:
            self._answer()
        except RuntimeFailed as error:
            self.close()
            raise RuntimeFailed(f"{what} does not load ({error.detail})") from error

    def call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs of a method. Raises RuntimeFailed."""
        name = method.encode()
        pieces = [_NUMBER.pack(len(name)), name, _NUMBER.pack(len(inputs))]
        for array in inputs:
            kind = TYPES.index(array.dtype.newbyteorder("<"))
            pieces.append(struct.pack(f"<BI{array.ndim}I", kind, array.ndim, *array.shape))
            pieces.append(np.ascontiguousarray(array, TYPES[kind]).tobytes())
        try:
            self._input.write(b"".join(pieces))
            self._input.flush()
        except (OSError, ValueError) as error:
            raise RuntimeFailed(f"{self._what}: the runner is gone ({error})") from error
        try:
            return self._answer()
        except RuntimeFailed as error:
            raise RuntimeFailed(f"method {method!r} of {self._what} stopped ({error.detail})") from error

    def close(self) -> None:
        """Ends the runner."""
        self._input.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        return self._process.stdout

    def _answer(self) -> list[NDArray[Any]]:
        badly = self._read(1)[0]
        if badly:
            raise RuntimeFailed(self._read(self._number()).decode(errors="replace"))
        return [self._tensor() for _ in range(self._number())]

    def _tensor(self) -> NDArray[Any]:
        kind, rank = struct.unpack("<BI", self._read(5))
        shape = struct.unpack(f"<{rank}I", self._read(4 * rank))
        dtype = TYPES[kind]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return np.frombuffer(bytearray(self._read(size)), dtype).reshape(shape)

    def _number(self) -> int:
        return int(_NUMBER.unpack(self._read(4))[0])

    def _read(self, size: int) -> bytes:
        data = self._output.read(size)
        if len(data) < size:
            raise RuntimeFailed(f"the runner ended with status {self._process.wait()}")
        return data


class RunnerRuntime(CallingRuntime):
    """A program's methods, by a runner."""

    def __init__(self, manifest: ProgramManifest, command: Sequence[str]) -> None:
        """command: serves the program (`serve_command`, or one over adb). B is zero. Raises RuntimeFailed."""
        super().__init__(manifest)
        self._served = Served(command, f"the program of recipe {manifest.recipe_id[:12]}")

    def _call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return self._served.call(method, inputs)

    def close(self) -> None:
        """Ends the runner."""
        self._served.close()


class RunnerInference:
    """An inference file, by a runner; see `device_agent.inference.Extending`."""

    def __init__(self, manifest: ProgramManifest, command: Sequence[str]) -> None:
        """command: serves the inference file. B is zero and the cache empty. Raises RuntimeFailed."""
        self._size = manifest.size
        self._served = Served(command, f"the inference program of recipe {manifest.recipe_id[:12]}")
        self.load(np.zeros(manifest.size, np.float32))

    def extend(self, tokens: Sequence[int], start: int, picks: Sequence[int]) -> F32:
        """Puts `tokens` at places `start` and on. Returns the logits (P, V) after the tokens that `picks` counts."""
        inputs = ([tokens], [start], picks)
        return self._served.call("extend", [np.array(values, TOKEN_DTYPE) for values in inputs])[0]

    def adapter(self) -> F32:
        """A copy of B, (D,)."""
        return self._served.call("adapter", [])[0]

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,) and empties the cache. Raises ValueError for another shape."""
        if flat.shape != (self._size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._size}")
        self._served.call("load", [flat.astype(np.float32, copy=False)])

    def close(self) -> None:
        """Ends the runner."""
        self._served.close()
