"""The client's jobs: asked for, watched, cancelled. Knows their routes; HTTP is the transport's."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mobizo.connection import Connection
from shared.job import JobRequest, JobView, Progress
from shared.program import SignedManifest
from shared.protocol import JobWaiting

Event = JobView | Progress


class Jobs(Connection):
    """Jobs of one tenant."""

    def submit(self, request: JobRequest) -> JobView:
        """Asks for a job. Tried again where no answer came: the server makes one job of all tries."""
        return JobView.model_validate(self._make("/v1/jobs", request.model_dump(mode="json", exclude_unset=True)))

    def job(self, job_id: str) -> JobView:
        """A job as it stands."""
        return JobView.model_validate(self._get(f"/v1/jobs/{job_id}"))

    def waiting(self, job_id: str) -> JobWaiting:
        """Why a job does not go on."""
        return JobWaiting.model_validate(self._get(f"/v1/jobs/{job_id}/waiting"))

    def jobs(self) -> Iterator[JobView]:
        """Every job of the tenant, newest first."""
        for item in self._pages("/v1/jobs"):
            yield JobView.model_validate(item)

    def cancel(self, job_id: str) -> JobView:
        """Stops a job wherever it is."""
        return JobView.model_validate(self._transport.request("POST", f"/v1/jobs/{job_id}/cancel").json())

    def watch(self, job_id: str) -> Iterator[Event]:
        """The job's events from its beginning, as they come: its view at each change of state, and its progress.

        Ends with the job; reconnects by itself where the stream broke off.
        """
        last: str | None = None
        while True:
            for event, event_id, data in self._transport.events(f"/v1/jobs/{job_id}/events", last_event_id=last):
                last = event_id or last
                if event == "progress":
                    yield Progress.model_validate(json.loads(data))
                elif event == "job":
                    view = JobView.model_validate(json.loads(data))
                    yield view
                    if view.state.final:
                        return
            if self.job(job_id).state.final:
                yield self.job(job_id)
                return

    def program(self, recipe_id: str) -> SignedManifest:
        """The signed manifest of the program that a recipe compiled to."""
        return SignedManifest.model_validate(self._get(f"/v1/programs/{recipe_id}"))
