"""The first page: what needs a person, and the state of jobs and devices at a glance."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import Response
from sqlalchemy.orm import Session

from server.catalog.bases import BaseRepository
from server.dashboard.access import signed_in
from server.dashboard.pages import Visitor
from server.dashboard.routes import PageRoutes
from server.database.columns import utc_now
from server.database.paging import PageRequest
from server.identity.devices.repository import DeviceRepository
from server.jobs.repository import JobRepository
from server.registry.repository import AdapterRepository
from server.web.state import Reading
from shared.access import Scope
from shared.job import OWNER_REFUSALS, TOO_FEW_NEW_RECORDS, JobState

ONLINE = timedelta(minutes=5)  # since the last request of a device
MAX_ROWS = 5  # rows of each list
RECENT = timedelta(days=7)  # in which failed jobs are worth a look

router = PageRoutes()


@router.get("/")
def overview(visitor: Annotated[Visitor, signed_in()], session: Reading) -> Response:
    """Shows the items that need a decision, and a summary of the fleet."""
    context: dict[str, Any] = {"first_steps": []}
    if visitor.may(Scope.JOBS_READ):
        context |= _jobs(session, visitor.principal.tenant)
    if visitor.may(Scope.DEVICES_READ):
        context |= _devices(session, visitor.principal.tenant)
    if visitor.may(Scope.ADAPTERS_READ):
        context["held_versions"] = AdapterRepository(session).held_versions(visitor.principal.tenant, MAX_ROWS + 1)
    if visitor.may(Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.DEVICES_READ, Scope.DEVICES_WRITE):
        context["first_steps"] = _first_steps(session, context)
    return visitor.page("overview.html", "Overview", most_rows=MAX_ROWS, **context)


def _jobs(session: Session, tenant: str) -> dict[str, Any]:
    jobs = JobRepository(session)

    def newest(state: JobState, number: int) -> list[Any]:
        rows = jobs.page(tenant, PageRequest(None, number), state).rows
        return [job.summary() for job in rows]

    since = utc_now() - RECENT
    ended = [job for job in newest(JobState.FAILED, 50) if job.updated_at >= since]
    failed = [job for job in ended if job.error is None or job.error.code != TOO_FEW_NEW_RECORDS]
    refused = [job for job in failed if job.error is not None and job.error.code in OWNER_REFUSALS]
    return {
        "counts": jobs.counts(tenant),
        "training": newest(JobState.TRAINING, MAX_ROWS),
        "refused": refused,
        "failed": [job for job in failed if job not in refused],
    }


def _first_steps(session: Session, context: dict[str, Any]) -> list[tuple[bool, str, str, str]]:
    """Returns what a new operator does first: whether it is done, its title, how, and the page for it.

    Empty once all is done.
    """
    steps = [
        (
            bool(BaseRepository(session).all()),
            "Register a base model",
            "On the server's host: mobizo-server base add NAME FILE.gguf",
            "",
        ),
        (context["enrolled"] > 0, "Enroll a device", "The page shows the command to run on it.", "/ui/devices/join"),
        (sum(context["counts"].values()) > 0, "Submit a job", "The form offers what the device has.", "/ui/jobs/new"),
    ]
    return [] if all(done for done, *_ in steps) else steps


def _devices(session: Session, tenant: str) -> dict[str, Any]:
    enrolled, online = DeviceRepository(session).census(tenant, utc_now() - ONLINE)
    return {"enrolled": enrolled, "online": online}
