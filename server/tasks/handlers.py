"""The interface between the task queue and the features whose tasks it runs: one handler for each kind of task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from sqlalchemy.orm import Session

from server.tasks.child_process import ChildProcess, Stopped
from shared.errors import MobizoError


class Postponed(Exception):
    """A task cannot begin yet; it is tried again after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"postponed for {seconds:.0f} s")
        self.seconds = seconds


@dataclass
class TaskRun:
    """The worker's side of a running task."""

    worker_id: str
    interval: float  # seconds between two calls of `should_continue`
    should_continue: Callable[[], bool]  # returns whether the task continues
    process: ChildProcess | None = None  # set by the handler; the worker reports its memory


class Handler(Protocol):
    """One kind of task. `begin` returns an order for `run`; handlers choose the types of orders and results.

    Every method that takes a session is called in a writing transaction; all but `lock` are called with the subject
    and the task locked.
    """

    kind: ClassVar[str]
    subject_name: ClassVar[str]  # what log lines call the subject

    def lock(self, session: Session, subject: str, *, signs: bool = False) -> bool:
        """Locks the subject; False if it no longer exists. signs: first locks the signing key, for `publish`."""

    def begin(self, session: Session, subject: str) -> Any:
        """Marks the subject as running and returns the order.

        Raises Postponed, or a MobizoError, which fails the task permanently.
        """

    def heartbeat(self, session: Session, order: Any) -> None:
        """Publishes the progress, if there is any."""

    def run(self, order: Any, run: TaskRun) -> Any | Stopped:
        """Runs the task outside of transactions and returns its result.

        Returns Stopped once `run.should_continue` returns False. Raises a MobizoError.
        """

    def publish(self, session: Session, order: Any, result: Any) -> bool:
        """Publishes the result. Returns False if the order is outdated; the task then runs again."""

    def wait(self, session: Session, subject: str, pause: float | None, attempts_left: int) -> None:
        """Marks the subject as waiting again. pause: seconds after a crash; None after an orderly stop."""

    def fail(self, session: Session, subject: str, error: MobizoError) -> None:
        """Marks the subject as failed permanently."""

    def is_transient(self, error: MobizoError) -> bool:
        """Returns whether another attempt may succeed."""

    def too_large(self, memory_bytes: int, most_bytes: int) -> MobizoError:
        """Returns the error of a task that no machine has memory for."""

    def killed(self) -> MobizoError:
        """Returns the error of a task whose worker died in every attempt."""
