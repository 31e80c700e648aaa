"""The rounds of cohorts that this device took part in: what was sent, and what it measured. Stays on the device.

One JSON line a round, the latest last; a line that a power cut tore is passed over. Knows no HTTP and no training.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.assignment import Ended, Outcome
from device_agent.durable import write_durably
from device_agent.handover import SentForm
from shared.job import Result, RoundRef

KEPT_ROUNDS = 1000  # the latest
WITHOUT = "the round ended, or its member left, before this device was done"


class PastRound(BaseModel):
    """How one round ended for this device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cohort: str
    round: int
    job_id: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    outcome: str = Field(description="of the job: completed, lost, failed, ...")
    detail: str | None = Field(None, description="why it did not count")
    form: SentForm | None = Field(None, description="what was sent; null: nothing was")
    bytes: int = Field(0, description="sent")
    steps: int = Field(0, description="trained")
    before_accuracy: float | None = Field(
        None, description="of what the round started from, on this device's own validation split"
    )
    after_accuracy: float | None = Field(None, description="of what this device made of it, on the same")

    def line(self) -> str:
        """All of it for people, on one line."""
        words = [f"{self.at:%Y-%m-%d %H:%M} UTC", f"round {self.round} of {self.cohort}", self.outcome]
        if self.form is not None:
            words.append(f"{self.bytes:,} bytes ({self.form})")
        if self.before_accuracy is not None and self.after_accuracy is not None:
            words.append(f"validation {self.before_accuracy:.1%} -> {self.after_accuracy:.1%}")
        if self.detail is not None:
            words.append(self.detail)
        return "  ".join(words)


def past_round(job_id: str, of: RoundRef, ended: Ended, result: Result | None) -> PastRound:
    """What is noted of a round. result: of the run, if it was trained to its end."""
    return PastRound(
        cohort=of.cohort,
        round=of.number,
        job_id=job_id,
        outcome=ended.outcome,
        detail=ended.detail or (WITHOUT if ended.outcome is Outcome.CANCELLED else None),
        form=ended.sent and ended.sent.form,
        bytes=0 if ended.sent is None else ended.sent.bytes,
        steps=0 if result is None else result.steps,
        before_accuracy=result and result.before_accuracy,
        after_accuracy=result and result.tuned_accuracy,
    )


class RoundLog:
    """The file that keeps them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def past(self) -> list[PastRound]:
        """The latest rounds, the oldest first."""
        found = []
        for line in self._lines():
            try:
                found.append(PastRound.model_validate_json(line))
            except ValidationError:
                continue
        return found[-KEPT_ROUNDS:]

    def add(self, past: PastRound) -> None:
        """Adds a round, durably; the oldest are forgotten now and then."""
        lines = self._lines()
        line = past.model_dump_json(exclude_none=True).encode() + b"\n"
        if len(lines) >= 2 * KEPT_ROUNDS or (lines and not lines[-1].endswith(b"\n")):
            write_durably(self._path, b"".join(kept.rstrip(b"\n") + b"\n" for kept in lines[1 - KEPT_ROUNDS :]) + line)
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[bytes]:
        try:
            return self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
