"""The one way a job changes: along the state machine, with an event for those who watch. Knows no HTTP.

A job that becomes ready gets in line for a device here, and leaves the line with that state.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.jobs.models import JOB_EVENT, PROGRESS_EVENT, Job
from server.jobs.repository import JobRepository
from server.privacy.service import PrivacyService
from server.programs.repository import ProgramRepository
from server.queue.matching import needs_of
from server.queue.readiness import note_ready
from server.queue.repository import QueueRepository
from shared.errors import Conflict
from shared.job import MOVES, JobState, Progress
from shared.program import SignedManifest


class JobLifecycle:
    """Changes to jobs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._jobs = JobRepository(session)
        self._queue = QueueRepository(session)
        self._programs = ProgramRepository(session)
        self._privacy = PrivacyService(session)
        self._signed: dict[str, SignedManifest | None] = {}  # by recipe: a program may have made many jobs ready

    def begin(self, job: Job) -> None:
        """Stores a new job and gives it its turn; its first event shows it as it begins."""
        job.turn = self._queue.next_turn(job.tenant, job.user)
        self._line_up(job)
        self._jobs.add(job)
        self._jobs.add_event(job, JOB_EVENT, job.view().model_dump_json())

    def move(self, job: Job, state: JobState, **changes: Any) -> None:
        """Moves a job to `state` and sets other columns with it. Raises Conflict if it cannot go there."""
        if state not in MOVES[job.state]:
            raise Conflict(f"job {job.id} is {job.state}; it cannot become {state}")
        job.state = state
        for name, value in changes.items():
            setattr(job, name, value)
        if state.final:
            self._privacy.forget_reserved(job)
        self._line_up(job)
        job.updated_at = utc_now()
        self._jobs.add_event(job, JOB_EVENT, job.view().model_dump_json())

    def progress(self, job: Job, progress: Progress) -> None:
        """Notes how training goes; the same again, as from a device that waits for hours, is no event."""
        job.updated_at = utc_now()
        if progress == job.progress:
            return
        job.progress = progress
        self._jobs.add_event(job, PROGRESS_EVENT, progress.model_dump_json())

    def _line_up(self, job: Job) -> None:
        """Puts a ready job in its lane, and takes any other out of line."""
        if job.state is not JobState.READY:
            job.lane_number = None
            return
        if job.recipe_id not in self._signed:
            self._signed[job.recipe_id] = self._programs.signed(job.recipe_id)
        signed = self._signed[job.recipe_id]
        cohort = None if job.round is None else job.round.cohort
        needs = needs_of(job.request, job.recipe, None if signed is None else signed.manifest, cohort)
        line = self._queue.lane(job, needs)
        job.lane_number = line.number
        note_ready(self._session, line)
