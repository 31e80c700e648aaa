"""Runs an inference program in a `mobizo-runner serve` process, over its pipes; see device_agent/runner/serve.hpp
for the protocol.
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
from device_agent.runner.location import packed_path
from device_agent.runtimes import F32
from shared.program import ProgramManifest
from shared.program_inputs import TOKEN_DTYPE

TYPES = (np.dtype("<f4"), np.dtype("<i8"), np.dtype("<i4"))
END_SECONDS = 5.0  # for the runner to exit after its input ends

_NUMBER = struct.Struct("<I")


def serve_command(runner: Path, program: Path, weights: Path) -> list[str]:
    """Returns the command that serves a program. runner: the directory of the runner."""
    files = ("--program", str(program), "--weights", str(weights), "--packed", str(packed_path(weights)))
    return [str(runner / "mobizo-runner"), "serve", *files]


class ServedProgram:
    """A program in a runner process."""

    def __init__(self, command: Sequence[str], name: str) -> None:
        """Starts the runner and waits until the program is loaded. name: of the program, for errors. Raises
        RuntimeFailed.
        """
        self._name = name
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise RuntimeFailed(
                f"the runner does not start ({error}); build it with `mobizo-agent build-runner`"
            ) from error
        try:
            self._answer()
        except RuntimeFailed as error:
            self.close()
            raise RuntimeFailed(f"{name} does not load ({error.detail})") from error

    def call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the outputs of a method. Raises RuntimeFailed."""
        encoded = method.encode()
        pieces = [_NUMBER.pack(len(encoded)), encoded, _NUMBER.pack(len(inputs))]
        for array in inputs:
            kind = TYPES.index(array.dtype.newbyteorder("<"))
            pieces.append(struct.pack(f"<BI{array.ndim}I", kind, array.ndim, *array.shape))
            pieces.append(np.ascontiguousarray(array, TYPES[kind]).tobytes())
        try:
            self._input.write(b"".join(pieces))
            self._input.flush()
        except (OSError, ValueError) as error:
            raise RuntimeFailed(f"{self._name}: the runner has exited ({error})") from error
        try:
            return self._answer()
        except RuntimeFailed as error:
            stopped = f"method {method!r} of {self._name} stopped"
            raise RuntimeFailed(f"{stopped} ({error.detail})", public=stopped) from error

    def close(self) -> None:
        """Stops the runner."""
        self._input.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None  # noqa: S101  # a pipe
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        return self._process.stdout

    def _answer(self) -> list[NDArray[Any]]:
        failed = self._read(1)[0]
        if failed:
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


class RunnerInference:
    """An inference file in a runner process; see `device_agent.inference.session.InferenceBackend`."""

    def __init__(self, manifest: ProgramManifest, command: Sequence[str]) -> None:
        """Starts `command`, which serves the inference file, with B = 0 and an empty cache. Raises RuntimeFailed."""
        self._size = manifest.size
        self._served = ServedProgram(command, f"the inference program of recipe {manifest.recipe_id[:12]}")
        self.load(np.zeros(manifest.size, np.float32))
        self.extend([0], 0, [0])  # the first call packs the weights

    def extend(self, tokens: Sequence[int], start: int, picks: Sequence[int]) -> F32:
        """Appends `tokens` at position `start`. Returns the logits (P, V) after the tokens at indices `picks`."""
        inputs = ([tokens], [start], picks)
        return self._served.call("extend", [np.array(values, TOKEN_DTYPE) for values in inputs])[0]

    def adapter(self) -> F32:
        """Returns a copy of B (D,)."""
        return self._served.call("adapter", [])[0]

    def load(self, flat: F32) -> None:
        """Sets B to a copy of `flat` (D,) and empties the cache. Raises ValueError for another shape."""
        if flat.shape != (self._size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._size}")
        self._served.call("load", [flat.astype(np.float32, copy=False)])

    def close(self) -> None:
        """Stops the runner."""
        self._served.close()
