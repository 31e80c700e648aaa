"""ExecuTorch programs that are no product's: baselines and floors, called with NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

# torch first: the extension module links against its libraries.
import torch
from executorch.extension.pybindings import _C


class Methods:
    """Methods of one program, loaded."""

    def __init__(self, program: Path, weights: Path | None, names: Iterable[str]) -> None:
        self._program = _C._load_program(str(program), data_path=None if weights is None else str(weights))
        self._methods = {name: self._program.load_method(name) for name in names}

    def __call__(self, name: str, *inputs: Any) -> list[np.ndarray]:
        """The outputs of one method."""
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        return [output.numpy() for output in self._methods[name].call(tensors)]
