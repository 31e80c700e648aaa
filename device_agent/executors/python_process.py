"""The Python executor: `python -m device_agent.executors.python_process BACKEND PROGRAM WEIGHTS [--resident]`.

It serves a program's methods by the protocol of `device_agent.executors.process`.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from device_agent.errors import RuntimeFailed
from device_agent.executors import Executor
from device_agent.executors.process import FAILED, FILE_LOST, OK, OUT_OF_MEMORY, USAGE, decode_tensors, encode_tensors
from device_agent.executors.python import open_executor

ORPHANED = 3  # exit status
MAX_NAME_BYTES = 64
_NUMBER = struct.Struct("<I")


def serve(open_it: Callable[[], Executor], requests: BinaryIO, answers: BinaryIO) -> int:
    """Answers requests until `requests` ends; returns the exit status. Raises ValueError for a malformed request."""

    def answer(status: int, *pieces: bytes) -> None:
        answers.write(b"".join((bytes([status]), *pieces)))
        answers.flush()

    def refuse(error: Exception) -> None:
        text = str(getattr(error, "detail", error)).encode()
        answer(_status(error), _NUMBER.pack(len(text)), text)

    def read(size: int) -> bytes:
        data = requests.read(size)
        if len(data) < size:
            raise ValueError("a request is incomplete")
        return data

    try:
        executor = open_it()
    except (RuntimeFailed, OSError, MemoryError) as error:
        refuse(error)
        return 1
    answer(OK, *encode_tensors(()))
    while first := requests.read(1):
        (length,) = _NUMBER.unpack(first + read(3))
        if length > MAX_NAME_BYTES:
            raise ValueError(f"a method's name has {length} bytes")
        method = read(length).decode()
        inputs = decode_tensors(read)
        try:
            outputs = _usage(executor) if method == USAGE else executor.call(method, inputs)
        except (RuntimeFailed, OSError, MemoryError) as error:
            refuse(error)
        else:
            answer(OK, *encode_tensors(outputs))
    return 0


def _usage(executor: Executor) -> list[NDArray[Any]]:
    usage = executor.usage()
    return [np.array([usage.rss_bytes, usage.peak_rss_bytes, round(usage.load_seconds * 1e6)], np.int64)]


def _status(error: Exception) -> int:
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    return FILE_LOST if isinstance(error, OSError) and error.errno == errno.EIO else FAILED


def _end_with_the_agent() -> None:
    """Ends this process, even within a call, when the other end of standard input is closed."""
    poll = select.poll()
    poll.register(0, 0)  # POLLHUP is always reported, and nothing is read
    poll.poll()
    os._exit(ORPHANED)


def main() -> None:
    """Entry point. Answers go to the original standard output; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_agent, daemon=True).start()
    backend, program, weights, *options = sys.argv[1:]
    resident = "--resident" in options

    def open_it() -> Executor:
        if backend == "torch":
            import torch

            torch.seed()  # otherwise every run of a recipe with noise `randn` would draw the same noise
        return open_executor(backend, Path(program), Path(weights), resident=resident)

    sys.exit(serve(open_it, sys.stdin.buffer, answers))


if __name__ == "__main__":
    main()
