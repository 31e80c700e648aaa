"""Executors of local tasks: in this process, or in other processes of this machine.

Results are returned in the order of the requests, so they do not depend on the workers' speed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from shared.errors import Unavailable
from simulation.worker import WorkerConfig, call

Engine = Literal["inline", "processes"]
CALLS_AHEAD = 4  # calls per worker that are submitted in advance


class InProcess:
    """Runs every call of a worker's method immediately, in this process."""

    workers = 1

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Runs the call and returns its result as a finished future."""
        future = Future[Any]()
        future.set_result(call(self._config, method, arguments))
        return future


class Processes:
    """Runs calls of a worker's methods in processes of this machine. workers: number of processes."""

    def __init__(self, config: WorkerConfig, workers: int) -> None:
        self._config, self.workers = config, workers
        # Spawned and not forked, because threads and library state of the parent must not be copied.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, initializer=_initialize_worker, initargs=(config.log,))

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Submits one call to the next free process."""
        with _no_interrupts():
            return self._pool.submit(call, self._config, method, arguments)

    def close(self) -> None:
        """Stops the processes and cancels calls that have not started."""
        self._pool.shutdown(cancel_futures=True)


Executor = InProcess | Processes


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Blocks SIGINT while a worker may be started. The worker inherits the mask until `_initialize_worker` runs."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _initialize_worker(log: Path) -> None:
    """Initializes a worker: sends its standard error to a file, and lets SIGINT end it silently."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def open_executor(config: WorkerConfig, workers: int, engine: Engine) -> Iterator[Executor]:
    """Yields an executor and stops its workers at the end. Raises Unavailable if a worker process is killed.

    workers: number of processes; ignored by engine `inline`.
    """
    if engine == "inline":
        yield InProcess(config)
        return
    processes = Processes(config, workers)
    try:
        yield processes
    except BrokenProcessPool as error:
        raise Unavailable(
            "a worker process was killed, probably for lack of memory; use fewer workers and start "
            "again: finished rounds are kept"
        ) from error
    finally:
        processes.close()


def results_in_order(executor: Executor, method: str, local_tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yields the results of many calls in order. At most CALLS_AHEAD calls per worker are submitted in advance."""
    waiting: deque[Future[Any]] = deque()
    for arguments in local_tasks:
        waiting.append(executor.submit(method, *arguments))
        if len(waiting) >= CALLS_AHEAD * executor.workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
