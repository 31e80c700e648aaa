"""Where errands run: in this process, in processes of this machine, or on a Ray cluster. One interface.

Answers come in the order in which they were asked for, so that nothing depends on which worker was faster. Knows
neither devices nor rounds.
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
from simulation.workshop import Place, call

Engine = Literal["inline", "processes", "ray"]
AHEAD = 4  # errands for each worker that are handed over before their turn


class Handle(Protocol):
    """An answer that is still to come."""

    def result(self) -> Any:
        """Waits for it. Raises what the errand raised."""


class Executor(Protocol):
    """Runs methods of a workshop."""

    @property
    def workers(self) -> int:
        """Errands that run at a time."""

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Hands one errand over."""

    def close(self) -> None:
        """Ends the workers."""


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class InProcess:
    """Everything in this process, as it is asked for."""

    workers = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Does the errand."""
        return _Done(call(self._place, method, arguments))

    def close(self) -> None:
        """Nothing is left to end."""


class Processes:
    """Processes of this machine."""

    def __init__(self, place: Place, workers: int) -> None:
        self._place, self.workers = place, workers
        # Not forked: the parent's threads and its copy of libraries' state are none of a worker's business.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(place.log,))

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Hands one errand to the next free process."""
        with _no_interrupts():
            return _Waited(self._pool.submit(call, self._place, method, arguments))

    def close(self) -> None:
        """Ends the processes, without what was not begun."""
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back while a worker may be started, which inherits that until `_begin` says what it does there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(log: Path) -> None:
    """Has a worker's standard error go to a file, as what libraries print is no terminal's; Ctrl-C ends it silently."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Waited:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self) -> Any:
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise Unavailable(
                "a worker process was ended from outside, probably for lack of memory; take fewer workers and start "
                "again: finished rounds are kept"
            ) from error


class Ray:
    """A Ray cluster, or a local one where none is running. Program and data must be under the same paths everywhere."""

    def __init__(self, place: Place, workers: int) -> None:
        """Raises BadRequest if Ray is not installed."""
        try:
            import ray
        except ImportError as error:
            raise BadRequest("engine ray needs the package ray: pip install 'mobizo[ray]'") from error
        self._ray, self._place, self.workers = ray, place, workers
        ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, num_cpus=None)
        self._call = ray.remote(num_cpus=place.threads)(call)

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Hands one errand to the cluster."""
        return _Remote(self._ray, self._call.remote(self._place, method, arguments))

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()


class _Remote:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def result(self) -> Any:
        return self._ray.get(self._reference)


class Opened:
    """An executor for as long as a `with` lasts."""

    def __init__(self, place: Place, workers: int, engine: Engine = "processes") -> None:
        """workers: of `inline` there is none but this process."""
        self._executor: Executor
        if engine == "inline":
            self._executor = InProcess(place)
        else:
            self._executor = Ray(place, workers) if engine == "ray" else Processes(place, workers)

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


def in_order(executor: Executor, method: str, errands: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The answers to many errands, in their order; only so many are in flight that no worker waits."""
    waiting: deque[Handle] = deque()
    for arguments in errands:
        waiting.append(executor.submit(method, *arguments))
        if len(waiting) >= AHEAD * executor.workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
