"""Messages from a training process to the agent: JSON lines, one `TrainerMessage` each."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from device_agent.errors import RuntimeFailed
from device_agent.training.journal import ResourceUsage
from shared.errors import InvalidDataset, MobizoError
from shared.job import JobError, Progress, Result


class TrainerMessage(BaseModel):
    """One line. The last one is result, trained, error or stopped; `detail` may quote the data and stays on the device.

    trained: all steps and validations are in the ledger and both B files are written; `build_result` reads them.
    spent: time and memory used by the sending process so far.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    progress: Progress | None = None
    result: Result | None = None
    trained: bool = False
    error: JobError | None = None
    stopped: bool = False
    detail: str | None = None
    spent: ResourceUsage | None = None


def describe(error: MobizoError) -> TrainerMessage:
    """Returns the message for an error: complete for this device, without data for the server."""
    if isinstance(error, RuntimeFailed):
        public_detail = error.public
    elif isinstance(error, InvalidDataset):
        public_detail = (
            "the data set cannot be read, or too few of its records fit the task; the device's own log says why"
        )
    else:
        public_detail = error.detail
    return TrainerMessage(error=JobError(code=error.code, detail=public_detail[:4000]), detail=error.detail)
