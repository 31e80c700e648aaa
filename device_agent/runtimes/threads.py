"""ExecuTorch's thread pool, which all programs of this process share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# torch comes first because the extension module links against its libraries.
import torch
from executorch.extension.pybindings import _C

STDERR = 2


@cache
def start_threads() -> None:
    """Starts the thread pool, once, without the lines that ExecuTorch then writes about the processor's files."""
    with _silenced():
        _C._threadpool_get_thread_count()


def use_threads(count: int) -> None:
    """Sets the number of threads. Call it before loading a program, because loaded programs keep their thread pool."""
    torch.set_num_threads(count)
    start_threads()
    if _C._threadpool_get_thread_count() != count:
        with _silenced():
            _C._unsafe_reset_threadpool(count)


@contextmanager
def _silenced() -> Iterator[None]:
    """Discards this process's standard error, because the native code has no option to be quiet."""
    stderr_copy, null_device = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, STDERR)
    try:
        yield
    finally:
        os.dup2(stderr_copy, STDERR)
        os.close(stderr_copy)
        os.close(null_device)
