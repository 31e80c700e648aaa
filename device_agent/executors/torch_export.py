"""Runs a program with PyTorch, on a GPU if there is one: the graphs of a `.pt2` archive and a safetensors file.

Every tensor is moved to the device once, when it is loaded, and every graph creates its tensors there.
"""

from __future__ import annotations

import json
import math
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from device_agent.errors import RuntimeFailed
from device_agent.executors import ExecutorUsage
from device_agent.executors.graph import DTYPES, JSON, Graph
from device_agent.memory import peak_rss_bytes, rss_bytes

FOLDERS = ("weights", "constants")  # of the archive; both contain tensors


class TorchExecutor:
    """The methods of one `.pt2`. They share tensors by name, and therefore B."""

    def __init__(self, program: Path, weights: Path, device: torch.device | None = None) -> None:
        """Loads the program onto `device` with B = 0; default: the first GPU, or else the CPU. Raises RuntimeFailed."""
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._graphs: dict[str, Graph] = {}
        began = time.monotonic()
        try:
            with _Archive(program) as archive, safe_open(weights, framework="pt") as base:
                tensors = _Tensors(archive, base, self.device)
                for method in archive.methods():
                    find_tensor = partial(tensors.find, archive.entries(method))
                    self._graphs[method] = Graph(archive.json(f"models/{method}.json"), find_tensor, self.device)
        except (OSError, zipfile.BadZipFile, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RuntimeFailed(f"{type(error).__name__}: {error}") from error
        self._load_seconds = time.monotonic() - began

    def call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns copies of a method's outputs. Raises RuntimeFailed."""
        if method not in self._graphs:
            raise RuntimeFailed(f"the program has no method {method!r}")
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        try:
            with torch.inference_mode():
                # Copied, because an output may be a view of B, which the next step changes.
                return [output.to("cpu", copy=True).numpy() for output in self._graphs[method](tensors)]
        except (RuntimeError, ValueError) as error:
            raise RuntimeFailed(f"method {method!r} of the program stopped ({error})") from error

    def usage(self) -> ExecutorUsage:
        """Returns this process's memory, and the seconds spent loading the graphs."""
        return ExecutorUsage(rss_bytes(), peak_rss_bytes(), self._load_seconds)

    def close(self) -> None:
        """Frees the program's memory."""
        self._graphs = {}


class _Archive(zipfile.ZipFile):
    """The records of a `.pt2` file, which are in one folder."""

    def record(self, name: str) -> bytes:
        """Returns a record's bytes. Raises KeyError if it does not exist."""
        folder = self.namelist()[0].split("/")[0]
        return self.read(f"{folder}/{name}")

    def json(self, name: str) -> Any:
        """Returns a parsed JSON record."""
        return json.loads(self.record(name))

    def methods(self) -> list[str]:
        """Returns the names of the methods."""
        paths = (PurePosixPath(name) for name in self.namelist())
        return [path.stem for path in paths if path.parts[1:2] == ("models",) and path.suffix == ".json"]

    def entries(self, method: str) -> dict[str, tuple[str, JSON]]:
        """Returns the record and the metadata of each tensor of a method, by the tensor's name."""
        return {
            name: (f"data/{folder}/{entry['path_name']}", entry["tensor_meta"])
            for folder in FOLDERS
            for name, entry in self.json(f"data/{folder}/{method}_{folder}_config.json")["config"].items()
        }


class _Tensors:
    """The stored tensors of all graphs, each loaded once.

    An empty record stands for a tensor of the weights file, or for a state tensor, which starts at zero.
    """

    def __init__(self, archive: _Archive, base: Any, device: torch.device) -> None:
        self._archive, self._base, self._device = archive, base, device
        self._state = set(archive.json("extra/state.json"))
        self._loaded: dict[str, Tensor] = {}

    def find(self, entries: dict[str, tuple[str, JSON]], name: str) -> Tensor:
        """Returns a tensor on the device; `entries` describe it. Raises KeyError or ValueError."""
        record, meta = entries[name]
        if record not in self._loaded:
            self._loaded[record] = self._read(name, record, meta).to(self._device)
        return self._loaded[record]

    def _read(self, name: str, record: str, meta: JSON) -> Tensor:
        shape, dtype = [size["as_int"] for size in meta["sizes"]], DTYPES[meta["dtype"]]
        data = self._archive.record(record)
        if data:
            if len(data) != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {len(data)} bytes")
            return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if name in self._state:
            return torch.zeros(shape, dtype=dtype)
        tensor: Tensor = self._base.get_tensor(name)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the weights file")
        return tensor
