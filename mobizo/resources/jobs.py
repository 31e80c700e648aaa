"""`client.jobs`: submit personalization jobs, watch their progress, cancel them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mobizo.connection import Resource
from mobizo.curve import Curve
from shared.errors import Conflict
from shared.job import JobRequest, JobSummary, JobView, Progress
from shared.protocol import JobWaiting

Event = JobView | Progress


class Jobs(Resource):
    """Jobs of the tenant. Methods with a `job_id` raise NotFound if the job does not exist."""

    def submit(self, request: JobRequest) -> JobView:
        """Submits a job and returns it. A retry after a lost response does not create a second job.

        Raises BadRequest or one of its subclasses if the server rejects the request.
        """
        body = request.model_dump(mode="json", exclude_unset=True)
        return self._connection.create(JobView, "/v1/jobs", body)

    def get(self, job_id: str) -> JobView:
        """Returns the job with its current state."""
        return self._connection.get(JobView, f"/v1/jobs/{job_id}")

    def list(self) -> Iterator[JobSummary]:
        """Yields all jobs of the tenant in short, newest first; `get` returns a whole one."""
        return self._connection.pages(JobSummary, "/v1/jobs")

    def waiting_reason(self, job_id: str) -> JobWaiting:
        """Returns why the job is waiting, in words, and how many devices could take it."""
        return self._connection.get(JobWaiting, f"/v1/jobs/{job_id}/waiting")

    def cancel(self, job_id: str) -> JobView:
        """Cancels the job and returns it. A device that is training stops at its next heartbeat.

        Raises Conflict if the job has succeeded or failed.
        """
        return self._connection.send(JobView, "POST", f"/v1/jobs/{job_id}/cancel")

    def retry(self, job_id: str) -> JobView:
        """Submits the request of an ended job again, as a new job, and returns the new job.

        Raises Conflict if the job has not ended, or if a cohort's round created it.
        """
        job = self.get(job_id)
        if job.round is not None:
            raise Conflict(
                f"{job_id} belongs to a round of cohort {job.round.cohort}, which opens the next round itself"
            )
        if not job.state.final:
            raise Conflict(f"{job_id} is {job.state}; wait until it ends, or cancel it before you retry it")
        return self.submit(job.request)

    def watch(self, job_id: str) -> Iterator[Event]:
        """Yields the job's events from its start: a JobView at each change of state, and Progress in between.

        The iterator waits for new events and ends with the job. It reconnects if the server ends the stream early.
        """
        last_id: str | None = None
        while True:
            events = self._connection.transport.events(f"/v1/jobs/{job_id}/events", last_event_id=last_id)
            for event, event_id, data in events:
                last_id = event_id or last_id
                if event == "progress":
                    yield Progress.model_validate(json.loads(data))
                elif event == "job":
                    view = JobView.model_validate(json.loads(data))
                    yield view
                    if view.state.final:
                        return
            job = self.get(job_id)
            if job.state.final:
                yield job
                return

    def curve(self, job_id: str) -> Curve:
        """Returns the job's losses and accuracies by step, for `plot()` and `to_frame()`. Waits until the job ends.

        For a job that has ended, the server keeps training losses for a limited time; accuracies stay with its result.
        """
        return Curve.of(self.watch(job_id))
