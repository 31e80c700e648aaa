"""Pages of jobs: the list, one job, submitting and cancelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from sqlalchemy.orm import Session

from server.catalog.bases import BaseService
from server.dashboard.access import FORM_BODY, Fields, signed_in
from server.dashboard.pages import page, redirect
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import Visitor
from server.identity.devices.repository import DeviceRepository
from server.jobs.repository import Job, JobFilter, JobRepository
from server.jobs.scheduling.explanation import ExplanationService
from server.jobs.service import JobService
from server.jobs.submission import prepare, submit_job
from server.web.bodies import parse_json
from server.web.pages import Paging
from server.web.state import AppState, Reading, State, Writing
from shared.access import Scope
from shared.errors import BadRequest, MobizoError
from shared.invalid_fields import first_invalid
from shared.job import NAME, JobRequest, JobState, Progress
from shared.task_templates import TASKS

router = PageRoutes(prefix="/ui/jobs")
Reader = Annotated[Visitor, signed_in(Scope.JOBS_READ)]
Writer = Annotated[Visitor, signed_in(Scope.JOBS_WRITE)]
Name = Annotated[str, Query(pattern=rf"^$|{NAME}", max_length=96)]
RECENT_EVENTS = 6  # in the table of a job's page
# The fields of the simple form: where each belongs in the request, and how it is read.
SIMPLE: Mapping[str, tuple[tuple[str, ...], type[str] | type[int] | type[float]]] = {
    "base": (("base",), str),
    "user": (("user",), str),
    "adapter": (("adapter",), str),
    "task": (("task",), str),
    "dataset": (("dataset",), str),
    "device": (("device",), str),
    "estimator": (("recipe", "estimator"), str),
    "rank": (("recipe", "rank"), int),
    "steps": (("training", "steps"), int),
    "lr": (("training", "lr"), float),
    "priority": (("priority",), int),
}
DEFAULTS = {"estimator": "auto", "rank": "16", "steps": "150", "lr": "0.01", "priority": "0"}


@router.get("")
def jobs(
    request: Request,
    visitor: Reader,
    session: Reading,
    paging: Paging,
    state: JobState | Literal[""] = "",
    user: Name = "",
    adapter: Name = "",
) -> Response:
    """The tenant's jobs, newest first, optionally of one state, user or adapter."""
    job_filter = JobFilter(state or None, user or None, adapter or None)
    rows = JobRepository(session).page(visitor.principal.tenant, paging, job_filter)
    listing = paging.page([job.summary() for job in rows.rows], rows.before)
    filters = {"state": state, "user": user, "adapter": adapter}
    return page(request, visitor, "jobs.html", "Jobs", listing=listing, filters=filters, states=list(JobState))


@router.get("/new")
def new(request: Request, visitor: Writer, state: State, session: Reading) -> Response:
    """The form that submits a job."""
    return _form(request, visitor, session, state, DEFAULTS)


@router.post("/new", openapi_extra=FORM_BODY)
async def submit(request: Request, visitor: Writer, form: Fields, state: State) -> Response:
    """Submits a job, as POST /v1/jobs does, or shows the form again with what is wrong."""
    try:
        job_request = await run_in_threadpool(read_request, form)
        await prepare(request, visitor.principal.tenant, job_request)
        return await state.write_queue.run(_submit, state, visitor, job_request)
    except MobizoError as error:
        if error.status >= 500:
            raise
        with state.database.reading() as session:
            return _form(request, visitor, session, state, dict(form), error)


def _submit(state: AppState, visitor: Visitor, job_request: JobRequest) -> Response:
    with state.database.writing() as session:
        job = submit_job(visitor.principal, job_request, state, session)
        return redirect(f"/ui/jobs/{job.id}", "submitted")


def read_request(form: Mapping[str, str]) -> JobRequest:
    """Returns the request of a form: of its JSON text if it has one, otherwise of its fields. Raises BadRequest."""
    text = form.get("json", "").strip()
    body = parse_json(text.encode()) if text else _body(form)
    try:
        return JobRequest.model_validate(body)
    except ValidationError as error:
        first = first_invalid(error)
        raise BadRequest(f"{first.path or 'the request'}: {first.message}") from error


def _body(form: Mapping[str, str]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, (path, kind) in SIMPLE.items():
        text = form.get(name, "").strip()
        if not text:
            continue
        try:
            value = kind(text)
        except ValueError as error:
            raise BadRequest(f"{name}: {text[:50]!r} is not a number") from error
        *outer, last = path
        inner = body
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return body


def _form(
    request: Request,
    visitor: Visitor,
    session: Session,
    state: AppState,
    values: Mapping[str, str],
    error: MobizoError | None = None,
) -> Response:
    bases = [base.name for base in BaseService(session, state.artifacts).all()]
    devices = DeviceRepository(session).newest(visitor.principal.tenant, 200) if visitor.may(Scope.DEVICES_READ) else []
    return page(
        request,
        visitor,
        "job_new.html",
        "Submit a job",
        200 if error is None else error.status,
        values=dict.fromkeys((*SIMPLE, "json"), "") | dict(values),
        error=error,
        field=error.detail.partition(":")[0] if error is not None else "",
        bases=bases,
        tasks=sorted(TASKS),
        devices=devices,
        name_pattern=NAME.strip("^$"),
    )


@router.get("/{job_id}")
def job(request: Request, visitor: Reader, job_id: str, state: State, session: Reading) -> Response:
    """One job: its state and reasons, its figures as they arrive, its result and settings."""
    stored_job = JobService(session, state.artifacts).get(visitor.principal.tenant, job_id)
    view = stored_job.view()
    return page(
        request,
        visitor,
        "job.html",
        f"Job {job_id}",
        job=view,
        times=stored_job.times,
        hides_figures=stored_job.hides_figures,
        waiting=None if view.state.final else ExplanationService(session).explain(stored_job),
        device=_device_name(session, visitor, stored_job),
        recent=recent_progress(session, stored_job),
        request_json=view.request.model_dump_json(indent=2, exclude_defaults=True),
        recipe_json=view.recipe.model_dump_json(indent=2),
    )


def _device_name(session: Session, visitor: Visitor, job: Job) -> str | None:
    if job.device_id is None or not visitor.may(Scope.DEVICES_READ):
        return None
    device = DeviceRepository(session).get(visitor.principal.tenant, job.device_id)
    return None if device is None else device.name


def recent_progress(session: Session, job: Job) -> list[Progress]:
    """Returns the progress in a job's last events, newest first."""
    events = JobRepository(session).events_after(job.number, max(0, job.events - RECENT_EVENTS), RECENT_EVENTS)
    reports = [Progress.model_validate_json(event.data) for event in events if event.kind == "progress"]
    return reports[::-1]


@router.post("/{job_id}/cancel", openapi_extra=FORM_BODY)
def cancel(visitor: Writer, form: Fields, job_id: str, state: State, session: Writing) -> Response:
    """Cancels a job, as POST /v1/jobs/ID/cancel does."""
    JobService(session, state.artifacts).cancel(visitor.principal.tenant, job_id)
    return redirect(f"/ui/jobs/{job_id}", "cancelled")
