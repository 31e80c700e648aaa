"""Runs an inference file with ExecuTorch's Python runtime in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# torch comes first, and the extension is imported without its wrapper; see `inprocess`.
import torch
from executorch.extension.pybindings import _C
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.runtimes import F32
from device_agent.runtimes.threads import start_threads
from shared.program import ProgramManifest
from shared.program_inputs import TOKEN_DTYPE

METHODS = ("adapter", "load", "extend")  # loading the first one sets B to zero


def _load_operators() -> None:
    """Loads the operators of ExecuTorch's LLM extension, if it is installed; programs call its attention."""
    for library in Path(_C.__file__).parents[1].glob("llm/custom_ops/*custom_ops_aot_lib.*"):
        torch.ops.load_library(library)


class InferenceRuntime:
    """The methods of one inference file, loaded from one program so that they share B and the cache."""

    def __init__(self, manifest: ProgramManifest, inference: Path, weights: Path) -> None:
        """Loads the program with B = 0 and an empty cache. Raises RuntimeFailed."""
        self._manifest = manifest
        try:
            start_threads()
            _load_operators()
            program = _C._load_program(str(inference), data_path=str(weights))
            self._methods = {name: program.load_method(name) for name in METHODS}
        except RuntimeError as error:
            raise RuntimeFailed(
                f"the inference program of recipe {manifest.recipe_id[:12]} does not load ({error}); "
                f"it was compiled for ExecuTorch {manifest.executorch}"
            ) from error
        self.load(np.zeros(manifest.size, np.float32))

    def _call(self, method: str, *inputs: NDArray[Any]) -> NDArray[Any]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        try:
            (output,) = self._methods[method].call(tensors)
        except RuntimeError as error:
            raise RuntimeFailed(f"method {method!r} of the inference program stopped ({error})") from error
        array: NDArray[Any] = output.numpy()
        return array

    def extend(self, tokens: Sequence[int], start: int, picks: Sequence[int]) -> F32:
        """Appends `tokens` at position `start`. Returns the logits (P, V) after the tokens at indices `picks`."""
        inputs = ([tokens], [start], picks)
        return self._call("extend", *(np.array(values, TOKEN_DTYPE) for values in inputs))

    def adapter(self) -> F32:
        """Returns a copy of B (D,)."""
        return self._call("adapter")

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,) and empties the cache. Raises ValueError for another shape."""
        if flat.shape != (self._manifest.size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._manifest.size}")
        self._call("load", flat.astype(np.float32, copy=False))

    def close(self) -> None:
        """Frees the program's memory."""
        self._methods = {}
