"""What can go wrong on a device besides what the contract already names.

MobizoError
|- BadRequest
|  `- InvalidDataset
|     `- UnusableRecord      a line of the device's data; says apart what may leave the device
|- Conflict
|  `- ChangedData             a private run's data set is not the one that it began with
|- NotEnrolled               no server has been joined yet
|- AlreadyRunning            another agent works in the same home
|- Unavailable
|  |- DoesNotFit             too little disk or memory right now: the job is given back, not failed
|  |  `- TooLittleMemory     before training: the job is declined, with numbers
|  `- NotNow                 the rules of the job or of this device's owner do not allow it for now
|- Untrusted
|  `- UnsafeManifest         a program's manifest names a file that would lie outside its directory
|- NoRunner                  the native runner can be neither built nor downloaded here
|- Diverged                  a loss or an update is no longer a number
`- RuntimeFailed             the program could not be loaded or run, or the process that trains died
"""

from __future__ import annotations

import errno

from shared.errors import Conflict, InvalidDataset, MobizoError, Unavailable, Untrusted


class UnusableRecord(InvalidDataset):
    """A data file has a line that cannot be used; correct the named line."""

    def __init__(self, detail: str, public: str) -> None:
        """detail: all there is to say, for this device only. public: the part that quotes nothing of the data."""
        super().__init__(detail)
        self.public = public


class ChangedData(Conflict):
    """The data set has changed since this private run began, whose samples are drawn; submit the job again."""

    code, title = "changed-data", "Changed data"


class NotEnrolled(MobizoError):
    """This device has joined no server yet: run `mobizo-agent enroll --server URL --token TOKEN --name NAME`."""

    code, title = "not-enrolled", "Not enrolled"


class AlreadyRunning(MobizoError):
    """Another mobizo-agent works in this home; stop it, or give this one a home of its own with --home."""

    code, title = "already-running", "Already running"


class DoesNotFit(Unavailable):
    """The device has too little free disk or memory for this program right now."""

    code, title = "does-not-fit", "Does not fit"


class TooLittleMemory(DoesNotFit):
    """The program needs more memory than is available."""

    code, title = "too-little-memory", "Too little memory"

    def __init__(self, needed: int, available: int, floor: int) -> None:
        """Bytes: what weights and planned memory need, what training may take, what the rules keep free beside it."""
        kept = f" beside the {floor / 1e6:.0f} MB that must stay free" if floor else ""
        super().__init__(
            f"the program needs {needed / 1e6:.0f} MB of memory for weights and activations, "
            f"but {available / 1e6:.0f} MB are available{kept}; stop something and the job is tried again"
        )
        self.needed, self.available = needed, available


class NotNow(Unavailable):
    """The rules do not allow training now; `mobizo-agent status` says why."""

    code, title = "not-now", "Not now"


class UnsafeManifest(Untrusted):
    """The program's manifest names a file that is no plain file name."""

    code, title = "unsafe-manifest", "Unsafe manifest"

    def __init__(self, lease_id: str, name: str) -> None:
        """lease_id: of the lease that the program came with. name: what is no plain file name."""
        super().__init__(
            f"the program's manifest names a file {name!r}, which is no plain file name and could lie outside the "
            f"program's directory; nothing of it was fetched; look at who can write to the server"
        )
        self.lease_id = lease_id


class NoRunner(MobizoError):
    """There is no native runner for this device; `mobizo-agent build-runner` says what a build needs."""

    code, title = "no-runner", "No native runner"


class Diverged(MobizoError):
    """Training diverged; lower lr."""

    code, title = "diverged", "Training diverged"


class RuntimeFailed(MobizoError):
    """The program could not be run on this device; the run's trainer.log has the runtime's own words."""

    code, title = "runtime-failed", "Runtime failed"


def os_words(error: OSError) -> str:
    """What the system refused, in one line with a way out."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}; free some and the job is tried again, nothing trained so far is lost"
    return f"{type(error).__name__}: {error}"
