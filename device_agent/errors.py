"""The agent's exceptions, in addition to those of `shared.errors`.

MobizoError
|- OwnerRefuses              the owner of this device does not allow the job; its text depends on no record
|  |- TaskNotApproved        the owner has not approved the task for the data set
|  `- PrivacyLimitReached    the job would exceed the owner's privacy limit for the data set
|- TooFewNewRecords          too few records are new since the start of a job that repeats
|- NotEnrolled               this device is not enrolled
|- AlreadyRunning            another agent uses the same home
|- Unavailable
|  |- DoesNotFit             too little disk space or memory; the job is released
|  |  `- TooLittleMemory     detected before training; the job is declined with the sizes
|  |- ProgramFileLost        a file of the program cannot be read while it is in use; the job is released
|  `- PolicyForbids          the job's or the owner's rules forbid training now
|- NoRunner                  the native runner is not installed or not usable; the job is released
|- Diverged                  a loss or an update is not finite
`- RuntimeFailed             the program could not be loaded or run
   `- ExecutorEnded          the executor ended or sent a malformed answer; also Unavailable: the job is released
"""

from __future__ import annotations

from shared.errors import MobizoError, Unavailable
from shared.job import PRIVACY_LIMIT_REACHED, TASK_NOT_APPROVED, TOO_FEW_NEW_RECORDS


class OwnerRefuses(MobizoError, code=MobizoError.code):
    """The owner of this device does not allow the job."""


class TaskNotApproved(OwnerRefuses, code=TASK_NOT_APPROVED):
    """The owner of this device has not approved the task for the data set."""


class PrivacyLimitReached(OwnerRefuses, code=PRIVACY_LIMIT_REACHED):
    """The job would exceed the privacy limit that the owner of this device set for the data set."""


class TooFewNewRecords(MobizoError, code=TOO_FEW_NEW_RECORDS):
    """The data set has too few records that are new since the start of a job that repeats."""


class NotEnrolled(MobizoError):
    """This device is not enrolled: run `mobizo-agent enroll --server URL --token TOKEN --name NAME`."""


class AlreadyRunning(MobizoError):
    """Another mobizo-agent uses this home directory; stop it, or choose another directory with --home."""


class DoesNotFit(Unavailable):
    """The device has too little free disk or memory for this program right now."""


class ProgramFileLost(Unavailable):
    """A file of the program was cut or cannot be read while it is in use; it is checked and downloaded again."""


class TooLittleMemory(DoesNotFit):
    """The program needs more memory than is available."""

    def __init__(self, needed: int, available: int, floor: int) -> None:
        """Bytes: needed for weights and planned memory, available for training, and reserved by the owner's rules."""
        reserved = f" besides the {floor / 1e6:.0f} MB that the rules reserve" if floor else ""
        super().__init__(
            f"the program needs {needed / 1e6:.0f} MB of memory for weights and activations, "
            f"but {available / 1e6:.0f} MB are available{reserved}; stop other programs, and the job is retried"
        )
        self.needed, self.available = needed, available


class PolicyForbids(Unavailable, code="not-now"):
    """The rules do not allow training now; `mobizo-agent status` shows why."""


class NoRunner(MobizoError, title="No native runner"):
    """The native runner is not installed; install the package mobizo-runner."""


class Diverged(MobizoError, title="Training diverged"):
    """Training diverged; lower lr."""


class RuntimeFailed(MobizoError):
    """The program could not be run on this device; see the agent's log for the runtime's messages."""

    def __init__(self, detail: str | None = None, public: str | None = None) -> None:
        """detail: the message, which may quote a library. public: the message for the server; default: `detail`."""
        super().__init__(detail)
        self.public = public or self.detail


class ExecutorEnded(RuntimeFailed, Unavailable):
    """The executor ended by itself or sent a malformed answer; see the agent's log for its last messages."""


class Stopped(Exception):
    """A stop function returned true. The run resumes from its directory."""
