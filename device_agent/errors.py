"""What can go wrong on a device besides what the contract already names.

MobizoError
|- BadRequest
|  `- InvalidDataset
|     `- UnusableRecord      a line of the device's data; says apart what may leave the device
|- NotEnrolled               no server has been joined yet
|- AlreadyRunning            another agent works in the same home
|- Unavailable
|  `- DoesNotFit             too little disk or memory right now: the job is given back, not failed
|- NoRunner                  the native runner can be neither built nor downloaded here
|- Diverged                  a loss or an update is no longer a number
`- RuntimeFailed             the program could not be loaded or run, or the process that trains died
"""

from __future__ import annotations

from shared.errors import InvalidDataset, MobizoError, Unavailable


class UnusableRecord(InvalidDataset):
    """A data file has a line that cannot be used; correct the named line."""

    def __init__(self, detail: str, public: str) -> None:
        """detail: all there is to say, for this device only. public: the part that quotes nothing of the data."""
        super().__init__(detail)
        self.public = public


class NotEnrolled(MobizoError):
    """This device has joined no server yet: run `mobizo-agent enroll --server URL --token TOKEN --name NAME`."""

    code, title = "not-enrolled", "Not enrolled"


class AlreadyRunning(MobizoError):
    """Another mobizo-agent works in this home; stop it, or give this one a home of its own with --home."""

    code, title = "already-running", "Already running"


class DoesNotFit(Unavailable):
    """The device has too little free disk or memory for this program right now."""

    code, title = "does-not-fit", "Does not fit"


class NoRunner(MobizoError):
    """There is no native runner for this device; `mobizo-agent build-runner` says what a build needs."""

    code, title = "no-runner", "No native runner"


class Diverged(MobizoError):
    """Training diverged; lower lr."""

    code, title = "diverged", "Training diverged"


class RuntimeFailed(MobizoError):
    """The program could not be run on this device; the run's trainer.log has the runtime's own words."""

    code, title = "runtime-failed", "Runtime failed"
