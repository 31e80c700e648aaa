"""The log of federated rounds that this device took part in, one JSON line per round; it stays on the device.

A damaged line is skipped.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from device_agent.jobs.leased_job import JobEnd, Outcome
from device_agent.jobs.upload import UploadForm
from shared.durable import write_pieces
from shared.job import RoundRef
from shared.result import Result
from shared.strict_model import StrictModel

KEPT_ROUNDS = 1000  # the latest
NOT_COUNTED = "the round ended, or the user left the cohort, before this device finished"


class RoundRecord(StrictModel):
    """How one round ended for this device."""

    cohort: str
    round: int
    job_id: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    outcome: str = Field(description="of the job: completed, lost, failed, ...")
    detail: str | None = Field(None, description="why the update did not count")
    form: UploadForm | None = Field(None, description="what was uploaded; null: nothing")
    bytes: int = Field(0, description="uploaded")
    steps: int = Field(0, description="trained")
    before_accuracy: float | None = Field(None, description="validation accuracy of the round's start on this device")
    after_accuracy: float | None = Field(None, description="validation accuracy after training on this device")

    def line(self) -> str:
        """Formats the record as one line for people."""
        parts = [f"{self.at:%Y-%m-%d %H:%M} UTC", f"round {self.round} of {self.cohort}", self.outcome]
        if self.form is not None:
            parts.append(f"{self.bytes:,} bytes ({self.form})")
        if self.before_accuracy is not None and self.after_accuracy is not None:
            parts.append(f"validation {self.before_accuracy:.1%} -> {self.after_accuracy:.1%}")
        if self.detail is not None:
            parts.append(self.detail)
        return "  ".join(parts)


def round_record(job_id: str, of: RoundRef, ended: JobEnd, result: Result | None) -> RoundRecord:
    """Returns the record of a round. result: the run's, if training was completed."""
    return RoundRecord(
        cohort=of.cohort,
        round=of.number,
        job_id=job_id,
        outcome=ended.outcome,
        detail=ended.detail or (NOT_COUNTED if ended.outcome is Outcome.CANCELLED else None),
        form=ended.upload and ended.upload.form,
        bytes=0 if ended.upload is None else ended.upload.bytes,
        steps=0 if result is None else result.steps,
        before_accuracy=result and result.before_accuracy,
        after_accuracy=result and result.tuned_accuracy,
    )


def past_rounds(path: Path) -> list[RoundRecord]:
    """Returns the latest KEPT_ROUNDS rounds in the log, oldest first."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValidationError):
            records.append(RoundRecord.model_validate_json(line))
    return records[-KEPT_ROUNDS:]


def log_round(path: Path, record: RoundRecord) -> None:
    """Adds a round to the log durably; the latest KEPT_ROUNDS stay."""
    records = [*past_rounds(path), record][-KEPT_ROUNDS:]
    write_pieces(path, (f"{each.model_dump_json(exclude_none=True)}\n".encode() for each in records))
