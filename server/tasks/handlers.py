"""The interface between the task queue and the features whose tasks it runs: one handler for each kind of task."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy.orm import Session

from server.storage.store import Damaged, StorageFull
from shared.errors import CompileFailed, MobizoError, Unavailable


class Postponed(Exception):
    """A task cannot begin yet; it is tried again after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"postponed for {seconds:.0f} s")
        self.seconds = seconds


@dataclass
class TaskRun:
    """The worker's side of a running task."""

    id: str  # of the attempt, for its workspace
    interval: float  # seconds between two calls of `should_continue`
    should_continue: Callable[[], bool]  # returns whether the task continues
    child_peak_bytes: Callable[[], int] = lambda: 0  # of the handler's child process; the worker reports it


class Killed(CompileFailed, code=CompileFailed.code, title=CompileFailed.title):
    """The worker was killed in every attempt; is there enough memory?"""


class Handler(ABC):
    """One kind of task. `begin` returns an order for `run`; handlers choose the types of orders and results.

    Every method that takes a session is called in a writing transaction with the task locked, and locks the subject.
    """

    kind: ClassVar[str]
    subject_name: ClassVar[str]  # what log lines call the subject

    def memory_bytes(self, session: Session, subject: str) -> int:
        """Returns the estimated peak memory of the task; by default it is too small to count."""
        return 0

    @abstractmethod
    def begin(self, session: Session, subject: str) -> Any | None:
        """Marks the subject as running and returns the order; None if the subject waits for no worker.

        Raises Postponed, or a MobizoError, which fails the task permanently.
        """

    @abstractmethod
    def heartbeat(self, session: Session, order: Any) -> bool:
        """Publishes the progress, if there is any. Returns False if nothing waits for the result any more."""

    @abstractmethod
    def run(self, order: Any, run: TaskRun) -> Any:
        """Runs the task outside of transactions and returns its result. Raises a MobizoError.

        Raises Stopped once `run.should_continue` returns False.
        """

    @abstractmethod
    def publish(self, session: Session, order: Any, result: Any) -> bool:
        """Publishes the result. Returns False if the order is outdated; the task then runs again."""

    def wait(self, session: Session, subject: str, why: str | None) -> None:  # noqa: B027  # optional
        """Marks the subject as waiting again. why: shown as progress; None after an orderly stop."""

    @abstractmethod
    def fail(self, session: Session, subject: str, error: MobizoError) -> None:
        """Marks the subject as failed permanently."""

    def is_transient(self, error: MobizoError) -> bool:
        """Returns whether another attempt may succeed. Not called for a store that is unavailable or full."""
        return False


def as_error(error: Exception) -> MobizoError:
    """Returns an exception of a handler as the reason of its task's failure; a full disk as StorageFull."""
    if isinstance(error, MobizoError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull()
    return MobizoError(f"{type(error).__name__}: {error}")


def is_outage(error: MobizoError) -> bool:
    """Returns whether a task waits until a store is available again or has space again."""
    return isinstance(error, Unavailable) and not isinstance(error, Damaged)
