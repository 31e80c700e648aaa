"""What a process that trains says to whoever started it: JSON lines, one `Message` each. Knows no process."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from device_agent.errors import UnusableRecord
from device_agent.journal import Figures
from shared.errors import InvalidDataset, MobizoError
from shared.job import JobError, Progress, Result


class Message(BaseModel):
    """One line. The last one is result, trained, error or stopped; `detail` may quote the data and stays on the device.

    trained: every step and validation is in the ledger and both B's are on disk; `conclude` makes the result of them.
    spent: by the process that speaks, so far.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    progress: Progress | None = None
    result: Result | None = None
    trained: bool = False
    error: JobError | None = None
    stopped: bool = False
    detail: str | None = None
    spent: Figures | None = None


def describe(error: MobizoError) -> Message:
    """The message that tells of an error: whole for the device, without a word of the data for the server."""
    if isinstance(error, UnusableRecord):
        told = error.public
    elif isinstance(error, InvalidDataset):
        told = "the data set cannot be used; the device's own log says why"
    else:
        told = error.detail
    return Message(error=JobError(code=error.code, detail=told[:4000]), detail=error.detail)
