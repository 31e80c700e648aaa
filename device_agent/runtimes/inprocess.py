"""Runs a program with ExecuTorch's Python runtime in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# torch comes first because the extension module links against its libraries. The extension is imported without its
# public wrapper, which imports the exporter (130 MB of memory).
import torch
from executorch.extension.pybindings import _C
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.memory import release_code_pages
from device_agent.runtimes import CallingRuntime
from device_agent.runtimes.threads import start_threads
from shared.program import ProgramManifest
from shared.recipe import Estimator

# Each group packs its own copy of the base weights, so only the group in use is loaded. prefix and suffix together have
# a step's layers; score_suffix adds the adapted ones and lm_head. The light methods stay loaded. `adapter` comes
# first, because loading it sets B to zero.
HEAVY = (("step",), ("prefix", "suffix", "score_suffix"), ("score",))
LIGHT = ("adapter", "replay", "load", "state", "restore")

# The buffers that contain B, which all methods share: of programs with `state`, and of the others by estimator.
OPTIMIZED = ("state.optimized",)
STATE: dict[Estimator, tuple[str, ...]] = {
    "replay": ("state.flat_b",),
    "stored": ("state.pairs", "state.pending"),
    "directional": ("state.flat_b",),
}

_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_LARGE = 64 << 10  # bytes; a layer's smallest packed weights are larger


def _give_freed_weights_back() -> None:
    """Makes glibc's malloc return large blocks to the system when they are freed.

    Otherwise malloc adapts its threshold and keeps one method's freed weights while the next method's are packed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)


class InProcessRuntime(CallingRuntime):
    """The methods of one `.pte`, loaded from one program so that they share B."""

    def __init__(self, manifest: ProgramManifest, program: Path, weights: Path, *, resident: bool = False) -> None:
        """Loads the program with B = 0. resident: keeps methods loaded after their first use. Raises RuntimeFailed."""
        super().__init__(manifest)
        self._resident = resident
        if manifest.recipe.noise == "operator":
            raise RuntimeFailed(
                f"the program of recipe {manifest.recipe_id[:12]} calls the noise operator, which ExecuTorch's Python "
                "runtime lacks; build the native runner with `mobizo-agent build-runner`"
            )
        _give_freed_weights_back()
        release_code_pages()
        self._files = (str(program), str(weights))
        self._methods: dict[str, Any] = {}
        self._open(LIGHT)

    def _open(self, names: Sequence[str]) -> None:
        path, weights = self._files
        try:
            start_threads()
            program = _C._load_program(path, data_path=weights)
            self._methods = {name: program.load_method(name) for name in names if name in self._manifest.methods}
        except RuntimeError as error:
            raise RuntimeFailed(
                f"the program of recipe {self._manifest.recipe_id[:12]} does not load ({error}); "
                f"it was compiled for ExecuTorch {self._manifest.executorch}"
            ) from error

    def _state(self) -> list[torch.Tensor]:
        """The program's own buffers that hold B, not copies."""
        adapter, manifest = self._methods["adapter"], self._manifest
        names = OPTIMIZED if "state" in manifest.methods else STATE[manifest.recipe.estimator]
        return [adapter.get_attribute(name) for name in names]

    def _switch(self, method: str) -> None:
        """Loads a heavy method, and those that go with it, in place of others, in a fresh program that takes B over.

        One program could load and unload methods too, but keeps some memory of each until it goes itself. Buffers are
        carried as they are: `adapter` and `load` would round what `stored` has not applied yet.
        """
        heavy = tuple(name for names in HEAVY if method in names for name in names)
        if self._resident:
            heavy += tuple(name for name in self._methods if name not in LIGHT)
        state_values = [buffer.clone() for buffer in self._state()]
        self.close()
        self._open((*LIGHT, *heavy))
        for buffer, value in zip(self._state(), state_values, strict=True):
            buffer.copy_(value)

    def _call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        if method not in self._manifest.methods:
            raise RuntimeFailed(f"the program of recipe {self._manifest.recipe_id[:12]} has no method {method!r}")
        if method not in self._methods:
            self._switch(method)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        try:
            outputs = self._methods[method].call(tensors)
        except RuntimeError as error:
            stopped = f"method {method!r} of the program stopped"
            raise RuntimeFailed(f"{stopped} ({error})", public=stopped) from error
        return [output.numpy() for output in outputs]

    def close(self) -> None:
        """Frees the program's memory."""
        self._methods = {}
