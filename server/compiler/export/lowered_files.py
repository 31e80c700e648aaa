"""Lowered graphs that are kept across compilations, one file each.

What a layer's graph is lowered to depends on the graph and on the toolchain, not on the base's weights. So recipes of a
base, and bases whose layers have the same shapes, share a file. Its name is a sha256 of all that its content depends
on: with another toolchain it is another file, and one that is damaged is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.export import ExportedProgram
from torch.fx import GraphModule

MAX_FILES = 500  # the ones that were read least lately are removed
LIBRARIES = ("torch", "executorch", "torchao")
PAYLOAD, FACTS, DIGEST = "payload", "facts", "sha256"


@dataclass(frozen=True)
class LoweredGraph:
    """What a backend made of a layer's graph."""

    payload: bytes
    keys: Mapping[str, str]  # in the payload, of the layer's tensors by name
    constants: Mapping[str, bytes]  # all others, by key
    sizes: Sequence[Sequence[int]]  # of its outputs


class LoweredFiles:
    """A directory of lowered graphs, which any number of processes may use. None: nothing is kept."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def read(self, name: str) -> LoweredGraph | None:
        """Returns the graph of this name; None if it is not kept or its file is damaged."""
        if self._directory is None:
            return None
        path = self._directory / name
        try:
            with safe_open(path, framework="numpy") as file:
                parts = {part: file.get_tensor(part).tobytes() for part in file.keys()}  # noqa: SIM118  # no mapping
                metadata = file.metadata()
            facts = json.loads(metadata[FACTS])
            if metadata[DIGEST] != _digest(facts, parts):
                return None
            os.utime(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        constants = {key: parts[key] for key in facts["constants"]}  # in the order in which a program stores them
        return LoweredGraph(parts[PAYLOAD], facts["keys"], constants, facts["sizes"])

    def write(self, name: str, graph: LoweredGraph) -> None:
        """Keeps a graph. A disk that refuses it costs a later compilation time, and this one nothing."""
        if self._directory is None:
            return
        sizes = [list(size) for size in graph.sizes]
        facts = {"keys": dict(graph.keys), "constants": list(graph.constants), "sizes": sizes}
        parts = {**graph.constants, PAYLOAD: graph.payload}
        metadata = {FACTS: json.dumps(facts), DIGEST: _digest(facts, parts)}
        with suppress(OSError, SafetensorError):
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._directory) as directory:
                path = Path(directory) / name
                save_file({part: np.frombuffer(data, np.uint8) for part, data in parts.items()}, path, metadata)
                path.replace(self._directory / name)
            self._remove_oldest(self._directory)

    def _remove_oldest(self, directory: Path) -> None:
        files = [path for path in directory.iterdir() if path.is_file()]
        if len(files) > MAX_FILES:
            files.sort(key=lambda path: path.stat().st_mtime)
            for path in files[: len(files) - MAX_FILES]:
                path.unlink(missing_ok=True)


def graph_name(exported: ExportedProgram, toolchain: Iterable[str]) -> str:
    """Returns the name of what an exported layer is lowered to. The values of its persistent buffers do not count.

    toolchain: all else that the result depends on, besides the versions of the libraries.
    """
    signature, persistent = exported.graph_signature, exported.state_dict.keys()
    parts = [*(f"{library} {version(library)}" for library in LIBRARIES), *toolchain, str(signature)]
    parts += [str(module.graph) for module in exported.graph_module.modules() if isinstance(module, GraphModule)]
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and value is not None:
            parts.append(f"{node.name} {value.dtype} {tuple(value.shape)} {value.stride()}")
    digest = hashlib.sha256("\0".join(parts).encode())
    for name, constant in sorted(exported.constants.items()):
        if name not in persistent:
            digest.update(f"\0{name} {constant.dtype} {tuple(constant.shape)}\0".encode())
            digest.update(constant.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _digest(facts: object, parts: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for part in sorted(parts):
        digest.update(part.encode())
        digest.update(parts[part])
    return digest.hexdigest()
