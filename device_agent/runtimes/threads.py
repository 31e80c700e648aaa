"""How many threads this process's programs run on: several processes on one machine would else wait for each other."""

from __future__ import annotations

# torch first: the extension module links against its libraries.
import torch
from executorch.extension.pybindings import _C


def use_threads(count: int) -> None:
    """To be called before a program is loaded: it replaces the pool of threads that programs hold on to."""
    torch.set_num_threads(count)
    if _C._threadpool_get_thread_count() != count:
        _C._unsafe_reset_threadpool(count)
