"""Executors of local tasks: in this process, in other processes of this machine, or on a Ray cluster.

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
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from shared.errors import BadRequest, Unavailable
from simulation.worker import WorkerConfig, call

Engine = Literal["inline", "processes", "ray"]
CALLS_AHEAD = 4  # calls per worker that are submitted in advance


class Handle(Protocol):
    """The pending result of a call."""

    def result(self) -> Any:
        """Waits for the result. Raises the call's exception."""


class Executor(Protocol):
    """Runs methods of a worker."""

    @property
    def workers(self) -> int:
        """Number of calls that run at a time."""

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Submits one call of a worker's method."""

    def close(self) -> None:
        """Stops the workers."""


class _FinishedCall:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class InProcess:
    """Runs every call immediately, in this process."""

    workers = 1

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Runs the call."""
        return _FinishedCall(call(self._config, method, arguments))

    def close(self) -> None:
        """Does nothing."""


class Processes:
    """Runs calls in processes of this machine."""

    def __init__(self, config: WorkerConfig, workers: int) -> None:
        self._config, self.workers = config, workers
        # Spawned and not forked, because threads and library state of the parent must not be copied.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, initializer=_initialize_worker, initargs=(config.log,))

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Submits one call to the next free process."""
        with _no_interrupts():
            return _ProcessCall(self._pool.submit(call, self._config, method, arguments))

    def close(self) -> None:
        """Stops the processes and cancels calls that have not started."""
        self._pool.shutdown(cancel_futures=True)


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


class _ProcessCall:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self) -> Any:
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise Unavailable(
                "a worker process was killed, probably for lack of memory; use fewer workers and start "
                "again: finished rounds are kept"
            ) from error


class Ray:
    """Runs calls on a Ray cluster, or on a local one if none is running. Paths must be the same on every machine."""

    def __init__(self, config: WorkerConfig, workers: int) -> None:
        """Raises BadRequest if Ray is not installed."""
        try:
            import ray
        except ImportError as error:
            raise BadRequest("engine ray needs the package ray: pip install 'mobizo[ray]'") from error
        self._ray, self._config, self.workers = ray, config, workers
        ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, num_cpus=None)
        self._call = ray.remote(num_cpus=config.threads)(call)

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Submits one call to the cluster."""
        return _RayCall(self._ray, self._call.remote(self._config, method, arguments))

    def close(self) -> None:
        """Disconnects from the cluster."""
        self._ray.shutdown()


class _RayCall:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def result(self) -> Any:
        return self._ray.get(self._reference)


class ExecutorContext:
    """A context manager that opens and closes an executor."""

    def __init__(self, config: WorkerConfig, workers: int, engine: Engine = "processes") -> None:
        """workers: number of workers; ignored by engine `inline`."""
        self._executor: Executor
        if engine == "inline":
            self._executor = InProcess(config)
        else:
            self._executor = Ray(config, workers) if engine == "ray" else Processes(config, workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.close()

    @property
    def executor(self) -> Executor:
        """The executor."""
        return self._executor


def results_in_order(executor: Executor, method: str, local_tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yields the results of many calls in order. At most CALLS_AHEAD calls per worker are submitted in advance."""
    waiting: deque[Handle] = deque()
    for arguments in local_tasks:
        waiting.append(executor.submit(method, *arguments))
        if len(waiting) >= CALLS_AHEAD * executor.workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
