"""Pages of jobs: the list, one job, submitting and cancelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from sqlalchemy.orm import Session

from server.catalog.bases import BaseRepository
from server.dashboard.access import Fields, signed_in
from server.dashboard.devices import device_names
from server.dashboard.pages import Visitor, redirect
from server.dashboard.routes import PageRoutes
from server.identity.devices.repository import BindingRepository, Device, DeviceRepository
from server.jobs.repository import Job, JobRepository
from server.jobs.scheduling.explanation import ExplanationService
from server.jobs.service import JobService
from server.jobs.submission import prepare, submit_job
from server.web.bodies import parse_json
from server.web.middleware import MAX_ERRORS
from server.web.pages import Paging
from server.web.state import AppState, Reading, State, Writing
from shared.access import Scope
from shared.errors import BadRequest, MobizoError
from shared.invalid_fields import invalid_fields
from shared.job import NAME, JobRequest, JobState, Progress
from shared.task_templates import TASKS

router = PageRoutes(prefix="/ui/jobs")
Reader = Annotated[Visitor, signed_in(Scope.JOBS_READ)]
Writer = Annotated[Visitor, signed_in(Scope.JOBS_WRITE)]
Name = Annotated[str, Query(pattern=rf"^$|{NAME}", max_length=96)]
RECENT_EVENTS = 6  # in the table of a job's page
DEVICES = 200  # newest ones, whose users and data sets the form offers
# The fields of the simple form: where each belongs in the request, how it is read, and its name for people.
SIMPLE: Mapping[str, tuple[tuple[str, ...], type[str] | type[int] | type[float], str]] = {
    "base": (("base",), str, "Base model"),
    "user": (("user",), str, "User"),
    "adapter": (("adapter",), str, "Adapter"),
    "task": (("task",), str, "Task"),
    "dataset": (("dataset",), str, "Data set"),
    "device": (("device",), str, "Device"),
    "start": (("start",), str, "Start"),
    "precision": (("recipe", "precision"), str, "Precision"),
    "layers": (("recipe", "layers"), str, "Layers"),
    "estimator": (("recipe", "estimator"), str, "Estimator"),
    "rank": (("recipe", "rank"), int, "LoRA rank"),
    "steps": (("training", "steps"), int, "Steps"),
    "lr": (("training", "lr"), float, "Learning rate"),
    "priority": (("priority",), int, "Priority"),
}
LABELS = {".".join(path): label for path, _, label in SIMPLE.values()}
DEFAULTS = {
    "precision": "int8",
    "layers": "last:40%",  # 12 of 30, as quickstart adapts
    "estimator": "auto",
    "rank": "16",
    "steps": "150",
    "lr": "0.01",
    "priority": "0",
}
NAME_RULE = "use lower-case letters, digits, dots, hyphens and underscores, with a letter or digit first"


@router.get("")
def jobs(
    visitor: Reader,
    session: Reading,
    paging: Paging,
    state: JobState | Literal[""] = "",
    user: Name = "",
    adapter: Name = "",
) -> Response:
    """The tenant's jobs, newest first, optionally of one state, user or adapter."""
    tenant = visitor.principal.tenant
    rows = JobRepository(session).page(tenant, paging, state or None, user or None, adapter or None)
    listing = paging.page([job.summary() for job in rows.rows], rows.before)
    filters = {"state": state, "user": user, "adapter": adapter}
    return visitor.page("jobs.html", "Jobs", listing=listing, filters=filters, states=list(JobState))


@router.get("/new")
def new(visitor: Writer, state: State, session: Reading) -> Response:
    """The form that submits a job."""
    return _form(visitor, session, state, DEFAULTS)


@router.post("/new")
async def submit(visitor: Writer, request: Request, form: Fields, state: State) -> Response:
    """Submits a job, as POST /v1/jobs does, or shows the form again with what is wrong."""
    try:
        job_request = await run_in_threadpool(read_request, state, visitor.principal.tenant, form)
        await prepare(request, visitor.principal.tenant, job_request)
        submission = partial(submit_job, visitor.principal, job_request, state)
        job = await state.write_queue.transact(submission)
        return redirect(f"/ui/jobs/{job.id}", "submitted")
    except MobizoError as error:
        if error.status >= 500:
            raise
        with state.database.reading() as session:
            return _form(visitor, session, state, dict(form), error)


def read_request(state: AppState, tenant: str, form: Mapping[str, str]) -> JobRequest:
    """Returns the request of a form: of its JSON text if it has one, otherwise of its fields.

    Raises BadRequest with all `errors`: what is invalid, and a user or data set that no device has.
    """
    text, faults = form.get("json", "").strip(), dict[str, str]()
    body = parse_json(text.encode()) if text else _body(form, faults)
    request = None
    try:
        request = JobRequest.model_validate(body)
    except ValidationError as error:
        for invalid in invalid_fields(error):
            path = "start" if invalid.location[:1] == ("start",) else invalid.path  # the text as a whole
            faults.setdefault(path, _in_words(invalid.message))
    if isinstance(body, dict):
        with state.database.reading() as session:
            faults |= _missing_on_devices(session, tenant, body, faults)
    if request is None or faults:
        errors = [{"field": path, "message": f"{LABELS.get(path, path)}: {fault}"} for path, fault in faults.items()]
        raise BadRequest("; ".join(each["message"] for each in errors[:MAX_ERRORS]), errors=errors[:MAX_ERRORS])
    return request


def _in_words(message: str) -> str:
    """Returns a message of pydantic for people who fill in a form."""
    if message == "Field required":
        return "fill this in"
    return NAME_RULE if message.startswith("String should match pattern") else message


def _missing_on_devices(
    session: Session, tenant: str, body: Mapping[str, Any], faults: Mapping[str, str]
) -> dict[str, str]:
    """Returns what is wrong with a user without a device, or with a data set that no device of the user offers."""
    user, dataset = body.get("user"), body.get("dataset")
    if not isinstance(user, str) or not isinstance(dataset, str) or {"user", "dataset"} & faults.keys():
        return {}
    devices = BindingRepository(session).newest_devices(tenant, user, DEVICES)
    if not devices:
        return {"user": f"no device is bound to {user}; `mobizo device bind DEVICE {user}` binds one"}
    if any(device.report is not None and dataset in device.report.datasets for device in devices):
        return {}
    return {"dataset": f"no device of {user} offers {dataset}; `mobizo-agent data add {dataset} FILE` adds it to one"}


def _body(form: Mapping[str, str], faults: dict[str, str]) -> dict[str, Any]:
    """Returns the request of the form's fields; adds those that are not numbers to `faults`, by their path in it."""
    body: dict[str, Any] = {}
    for name, (path, kind, _) in SIMPLE.items():
        text = form.get(name, "").strip()
        if not text:
            continue
        try:
            value = kind(text)
        except ValueError:
            faults[".".join(path)] = f"{text[:50]!r} is not a number"
            continue
        *outer, last = path
        inner = body
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return body


def _form(
    visitor: Visitor,
    session: Session,
    state: AppState,
    values: Mapping[str, str],
    error: MobizoError | None = None,
) -> Response:
    bases = [base.name for base in BaseRepository(session).all()]
    devices: Sequence[Device] = []
    if visitor.may(Scope.DEVICES_READ):
        devices = DeviceRepository(session).newest(visitor.principal.tenant, DEVICES)
    users = BindingRepository(session).users_of([device.id for device in devices])
    errors = [] if error is None else error.extra.get("errors", [{"field": "", "message": error.detail}])
    return visitor.page(
        "job_new.html",
        "Submit a job",
        200 if error is None else error.status,
        values=dict.fromkeys((*SIMPLE, "json"), "") | dict(values),
        labels={name: label for name, (_, _, label) in SIMPLE.items()},
        errors=errors,
        wrong={each["field"].rpartition(".")[2] for each in errors},
        bases=bases,
        tasks=sorted(TASKS),
        devices=devices,
        users=sorted({user for each in users.values() for user in each}),
        datasets=sorted({name for device in devices if device.report for name in device.report.datasets}),
    )


@router.get("/{job_id}")
def job(visitor: Reader, job_id: str, state: State, session: Reading) -> Response:
    """One job: its state and reasons, its figures as they arrive, its result and settings."""
    stored_job = JobRepository(session).get(visitor.principal.tenant, job_id)
    view = stored_job.view()
    return visitor.page(
        "job.html",
        f"Job {job_id}",
        job=view,
        times=stored_job.times,
        hides_figures=stored_job.hides_figures,
        waiting=None if view.state.final else ExplanationService(session).explain(stored_job),
        names=device_names(session, visitor, [stored_job.device_id]),
        recent=recent_progress(session, stored_job),
        request_json=view.request.model_dump_json(indent=2, exclude_defaults=True),
        recipe_json=view.recipe.model_dump_json(indent=2),
    )


def recent_progress(session: Session, job: Job) -> list[Progress]:
    """Returns the progress in a job's last events, newest first."""
    events = JobRepository(session).events_after(job.number, max(0, job.events - RECENT_EVENTS), RECENT_EVENTS)
    reports = [Progress.model_validate_json(event.data) for event in events if event.kind == "progress"]
    return reports[::-1]


@router.post("/{job_id}/cancel")
def cancel(visitor: Writer, form: Fields, job_id: str, state: State, session: Writing) -> Response:
    """Cancels a job, as POST /v1/jobs/ID/cancel does."""
    JobService(session, state.artifacts).cancel(visitor.principal.tenant, job_id)
    return redirect(f"/ui/jobs/{job_id}", "cancelled")
