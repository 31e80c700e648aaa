"""Layers to lower, and lowering several graphs at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from server.compiler.model.rounding import Scheme
from shared.errors import CompileFailed

T = TypeVar("T")
Example = tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one graph."""

    layers: Sequence[nn.Module]  # equal except for their persistent buffers
    example: Example  # inputs for the export
    scheme: Scheme | None  # how integers of the buffers are stored


Lower = Callable[[Sequence[LayerGroup]], list[list[nn.Module]]]  # returns one module for each layer


def unchanged(groups: Sequence[LayerGroup]) -> list[list[nn.Module]]:
    """Returns the layers as they are."""
    return [list(group.layers) for group in groups]


def at_once(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Returns the result of every function, in order.

    On Linux with several cores, all but the last run in child processes, which have no children of their own. They
    begin with a copy of this process's memory, so only results are sent. Raises what a function raises, or
    CompileFailed if a child ends without a result.
    """
    if not functions or cores() < 2 or current_process().daemon:
        return [function() for function in functions]
    children = [Child(function) for function in functions[:-1]]
    last = functions[-1]()
    return [*(child.result() for child in children), last]


def cores() -> int:
    """The cores that this process may use; 1 where processes cannot be copied safely."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Child(Generic[T]):
    """A function that runs in a child process."""

    def __init__(self, function: Callable[[], T]) -> None:
        context = get_context("fork")
        self._results, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_result, args=(function, sender), daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> T:
        """Waits for the result."""
        try:
            answer: T | Exception = self._results.recv()
        except EOFError:
            self._process.join()
            answer = CompileFailed(
                f"a process that lowered layers ended with exit code {self._process.exitcode} and without a result; "
                "-9 often means that memory ran out"
            )
        if isinstance(answer, Exception):
            raise answer
        return answer


def _send_result(function: Callable[[], T], sender: Connection) -> None:
    torch.set_num_threads(1)  # a copy of a process does not have its other threads
    try:
        sender.send(function())
    except Exception as error:
        sender.send(error)
