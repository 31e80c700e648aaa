"""A program run by ExecuTorch's Python runtime, in this process. Knows no data set and no journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# torch first: the extension module links against its libraries. The extension is imported by itself because its
# public wrapper pulls in the exporter, 130 MB of memory that a device has better use for.
import torch
from executorch.extension.pybindings import _C
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.runtimes import F32, Arrays
from shared.program import METHODS, ProgramManifest


class InProcessRuntime:
    """The methods of one `.pte`, all loaded from the same program so that they share B."""

    def __init__(self, manifest: ProgramManifest, program: Path, weights: Path) -> None:
        """Loads every method; B is zero. Raises RuntimeFailed."""
        self._size = manifest.size
        try:
            self._program = _C._load_program(str(program), data_path=str(weights))
            self._methods = {name: self._program.load_method(name) for name in METHODS}
        except RuntimeError as error:
            raise RuntimeFailed(
                f"the program of recipe {manifest.recipe_id[:12]} does not load ({error}); "
                f"it was compiled for ExecuTorch {manifest.executorch}"
            ) from error
        self.load(np.zeros(self._size, np.float32))

    def _call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        try:
            outputs = self._methods[method].call(tensors)
        except RuntimeError as error:
            raise RuntimeFailed(f"method {method!r} of the program stopped ({error})") from error
        return [output.numpy() for output in outputs]

    def step(self, batch: Arrays, seeds: NDArray[np.int32], lr: float, eps: float) -> tuple[F32, F32]:
        """One MobiZO step; see `Runtime.step`."""
        scalars = (np.array([lr], np.float32), np.array([eps], np.float32))
        losses, coefficients = self._call("step", (*batch, seeds, *scalars))
        return losses, coefficients

    def replay(self, seeds: NDArray[np.int32], coefficients: F32) -> None:
        """The update of one recorded step; see `Runtime.replay`."""
        self._call("replay", (seeds, coefficients))

    def score(self, batch: Arrays) -> F32:
        """Log-probabilities (R, T, C)."""
        return self._call("score", batch)[0]

    def adapter(self) -> F32:
        """A copy of B, (D,)."""
        return self._call("adapter", ())[0]

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,). Raises ValueError for another shape."""
        if flat.shape != (self._size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._size}")
        self._call("load", (flat.astype(np.float32, copy=False),))

    def close(self) -> None:
        """Frees the program's memory."""
        self._methods.clear()
        del self._program
