"""Runs a program, for training or for inference, with ExecuTorch's Python runtime in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

# torch comes first because the extension module links against its libraries. The extension is imported without its
# public wrapper, which imports the exporter (130 MB of memory).
import torch
from executorch.extension.pybindings import _C
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.executors import ExecutorUsage
from device_agent.memory import map_large_blocks, peak_rss_bytes, release_code_pages, rss_bytes

# Each group packs its own copy of the base weights, so only the group in use is loaded. prefix and suffix together have
# a step's layers; score_suffix adds the adapted ones and lm_head. All other methods stay loaded. `adapter` comes first,
# because loading it sets B to zero.
HEAVY = (("step",), ("prefix", "suffix", "score_suffix"), ("score",))
FIRST = "adapter"

# The buffers that contain B, which all methods share: a program has the first, the two for `stored`, or the last.
STATE = ("state.flat_b", "state.pairs", "state.pending", "state.optimized")


class ExecuTorchExecutor:
    """The methods of one `.pte`, loaded from one program so that they share B."""

    def __init__(self, program: Path, weights: Path, *, resident: bool = False) -> None:
        """Loads the program with B = 0. resident: keeps methods loaded after their first use. Raises RuntimeFailed."""
        self._resident = resident
        self._load_seconds = 0.0
        map_large_blocks()  # one method's freed weights would stay while the next method's are packed
        release_code_pages()
        self._files = (str(program), str(weights))
        self._methods: dict[str, Any] = {}
        self._names: tuple[str, ...] = ()
        self._open(())

    def _open(self, heavy: Sequence[str]) -> None:
        """Loads the program anew, with these heavy methods."""
        path, weights = self._files
        began = time.monotonic()
        try:
            # Inference programs call the attention of ExecuTorch's LLM extension, if it is installed.
            for library in Path(_C.__file__).parents[1].glob("llm/custom_ops/*custom_ops_aot_lib.*"):
                torch.ops.load_library(library)
            program = _C._load_program(path, data_path=weights)
            self._names = tuple(program.get_method_name(index) for index in range(program.num_methods()))
            light = [name for name in self._names if not any(name in group for group in HEAVY)]
            names = sorted({*light, *heavy} & {*self._names}, key=lambda name: name != FIRST)
            self._methods = {name: program.load_method(name) for name in names}
        except RuntimeError as error:
            raise RuntimeFailed(str(error)) from error
        self._load_seconds += time.monotonic() - began

    def _state(self) -> list[torch.Tensor]:
        """The program's own buffers that hold B, not copies."""
        buffers = []
        for name in STATE:
            with suppress(RuntimeError):  # another program's
                buffers.append(self._methods[FIRST].get_attribute(name))
        return buffers

    def _switch(self, method: str) -> None:
        """Loads a heavy method, and those that go with it, in place of others, in a fresh program that takes B over.

        One program could load and unload methods too, but keeps some memory of each until it goes itself. Buffers are
        carried as they are: `adapter` and `load` would round what `stored` has not applied yet. B also stays where the
        method does not load. Raises RuntimeFailed.
        """
        heavy = tuple(name for group in HEAVY if method in group for name in group)
        if self._resident:
            heavy += tuple(self._methods)
        state_values = [buffer.clone() for buffer in self._state()]
        self.close()
        failure = None
        try:
            self._open(heavy)
        except RuntimeFailed as error:
            failure = error
            self._open(())
        for buffer, value in zip(self._state(), state_values, strict=True):
            buffer.copy_(value)
        if failure is not None:
            raise RuntimeFailed(f"method {method!r} of the program does not load ({failure.detail})") from failure

    def call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns copies of a method's outputs. Raises RuntimeFailed."""
        if method not in self._names:
            raise RuntimeFailed(f"the program has no method {method!r}")
        if method not in self._methods:
            self._switch(method)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in inputs]
        try:
            outputs = self._methods[method].call(tensors)
        except RuntimeError as error:
            raise RuntimeFailed(f"method {method!r} of the program stopped ({error})") from error
        return [output.numpy() for output in outputs]

    def usage(self) -> ExecutorUsage:
        """Returns this process's memory, and the seconds spent loading methods."""
        return ExecutorUsage(rss_bytes(), peak_rss_bytes(), self._load_seconds)

    def close(self) -> None:
        """Frees the program's memory."""
        self._methods = {}
