"""Pages of adapters: the list, one adapter with its lineage, one version, comparing two, and trying one out.

The forms by which people decide about versions do what the REST routes of the same names do.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import ValidationError
from sqlalchemy.orm import Session

from server.dashboard.access import Fields, signed_in
from server.dashboard.devices import device_names
from server.dashboard.pages import Visitor, redirect
from server.dashboard.routes import PageRoutes
from server.database.paging import PageRequest
from server.inference.responses import Generation, score
from server.registry.comparison import compare_revisions
from server.registry.decisions import DecisionService
from server.registry.endpoints import Version
from server.registry.models import Adapter, AuditTrail, StoredVersion, event_view
from server.registry.ratings import RatingService
from server.registry.repository import AdapterRepository, find_adapter, read_version, resolve
from server.registry.service import AdapterService, ApprovalService, removed_after
from server.web.pages import Paging
from server.web.state import Reading, State, Writing
from server.web.streams import EVENTS, cancelled_on_disconnect, event_stream
from shared.access import Scope
from shared.errors import BadRequest, MobizoError
from shared.openai.answers import CompletionWriter
from shared.openai.requests import CompletionRequest
from shared.registry import VersionState
from shared.scoring import ScoreRequest, ScoreRow
from shared.task import record_fields

router = PageRoutes(prefix="/ui/adapters")
Reader = Annotated[Visitor, signed_in(Scope.ADAPTERS_READ)]
Asker = Annotated[Visitor, signed_in(Scope.ADAPTERS_SCORE)]
Writer = Annotated[Visitor, signed_in(Scope.ADAPTERS_WRITE)]
Revision = Annotated[str, Query(max_length=100)]
AUDIT = 20  # entries of the audit trail on a version's page
TOKENS = 128  # most tokens of a text that is tried out
MAX_REASON = 1000  # characters, as in `shared.registry.Decision`
FIELD = "field-"  # before a record's field in the name of a form's


@router.get("")
def adapters(visitor: Reader, state: State, session: Reading, paging: Paging) -> Response:
    """The tenant's adapters, newest first."""
    rows = AdapterRepository(session).page(visitor.principal.tenant, paging)
    listing = paging.page(AdapterService(session).views(rows.rows, state.settings.adapter_grace), rows.before)
    held_versions = AdapterRepository(session).held_versions(visitor.principal.tenant, 20)
    return visitor.page("adapters.html", "Adapters", listing=listing, held_versions=held_versions)


@router.get("/{name}")
def adapter(visitor: Reader, name: str, state: State, session: Reading, paging: Paging) -> Response:
    """An adapter: its versions with their scores and lineage, its rule, and its audit trail."""
    stored_adapter = find_adapter(session, visitor.principal.tenant, name)
    rows = AdapterRepository(session).versions(stored_adapter, paging, None)
    grace = state.settings.adapter_grace
    versions = [row.view(stored_adapter, removed_after(row.deleted_at, grace)) for row in rows.rows]
    trail = AuditTrail(session).page(visitor.principal.tenant, name, PageRequest(None, AUDIT))
    return visitor.page(
        "adapter.html",
        f"Adapter {name}",
        adapter=AdapterService(session).view(stored_adapter, grace),
        listing=paging.page(versions, rows.before),
        rule=ApprovalService(session).of_adapter(stored_adapter),
        trail=[event_view(row) for row in trail.rows],
        names=device_names(session, visitor, [row.actor for row in trail.rows]),
    )


@router.get("/{name}/ratings")
def download_ratings(visitor: Writer, name: str, session: Reading) -> Response:
    """The ratings of an adapter's texts, as JSON lines for a task of kind `preference`."""
    records = RatingService(session).records(find_adapter(session, visitor.principal.tenant, name))
    headers = {"Content-Disposition": f'attachment; filename="{name}-ratings.jsonl"'}
    return Response("".join(f"{json.dumps(record)}\n" for record in records), 200, headers, "application/jsonl")


@router.get("/{name}/compare")
def compare(
    visitor: Reader,
    name: str,
    session: Reading,
    left: Revision,
    right: Revision,
    other: Revision = "",
) -> Response:
    """Two versions side by side, as GET /v1/adapters/NAME/compare."""
    tenant, sides = visitor.principal.tenant, ((name, left), (other or name, right))
    comparison = compare_revisions(session, tenant, *sides)
    splits = [resolve(session, tenant, *side)[1].result.accuracy_split for side in sides]
    return visitor.page("versions.html", "Compare versions", name=name, compared=comparison, splits=splits)


@router.get("/{name}/versions/{version}")
def version(visitor: Reader, name: str, version: Version, state: State, session: Reading) -> Response:
    """One version: its scores, settings, and the decisions that a person may take."""
    at = resolve(session, visitor.principal.tenant, name, f"v{version}")
    return _version_page(visitor, session, *at)


def _version_page(
    visitor: Visitor,
    session: Session,
    adapter: Adapter,
    version: StoredVersion,
    error: MobizoError | None = None,
    **tried: Any,
) -> Response:
    """tried: what was asked and answered, as the template names it."""
    task = version.manifest.task
    defaults: dict[str, Any] = {"fields": [], "record": {}, "scores": None, "prompt": "", "text": None}
    if not task.generates:
        defaults["fields"] = [
            (field, next((list(mapped.values) for mapped in task.mapped.values() if mapped.field == field), None))
            for field in record_fields(task)
        ]
    view = version.view(adapter)
    return visitor.page(
        "version.html",
        "Adapter version",
        200 if error is None else error.status,
        version=view,
        names=device_names(session, visitor, [view.device_id]),
        main=adapter.main_version,
        states=VersionState,
        error=error,
        most_tokens=TOKENS,
        may_rate=RatingService(session).allowed(adapter.tenant),
        **(defaults | tried),
    )


def _decides(visitor: Visitor) -> bool:
    """Returns whether a visitor may approve held versions, and so try them before."""
    return visitor.may(Scope.ADAPTERS_WRITE)


@router.post("/{name}/versions/{version}/choose")
async def choose(visitor: Asker, request: Request, form: Fields, name: str, version: Version, state: State) -> Response:
    """Chooses among the answers of the version's task, as POST /v1/score does, by the version and by its base."""
    tenant = visitor.principal.tenant
    manifest = read_version(state.database, tenant, name, f"v{version}").signed.manifest
    if manifest.task.generates:
        raise BadRequest(f"{name} v{version} learned to write text, not to choose an answer: give it a prompt instead")
    record = {name: form[FIELD + name] for name in record_fields(manifest.task) if FIELD + name in form}
    rows = tuple(ScoreRow(adapter=adapter, record=record) for adapter in (f"{name}@v{version}", None))
    scores, problem = None, None
    try:
        score_request = ScoreRequest(
            task=manifest.task, base=manifest.base.name, base_sha256=manifest.base.sha256, rows=rows
        )
        scores = await cancelled_on_disconnect(request, score(state, tenant, score_request, _decides(visitor)))
    except MobizoError as error:
        problem = error
    with state.database.reading() as session:
        at = resolve(session, tenant, name, f"v{version}")
        return _version_page(visitor, session, *at, problem, record=record, scores=scores)


@router.post("/{name}/versions/{version}/rate")
def rate(visitor: Asker, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Stores whether a person liked a text that the version wrote."""
    rating = form.get("rating")
    if rating not in ("up", "down") or not form.get("completion"):
        raise BadRequest("rate a text that this page has shown")
    # Browsers send line breaks of forms as CRLF.
    prompt, completion = (form.get(field, "").replace("\r\n", "\n") for field in ("prompt", "completion"))
    tenant = visitor.principal.tenant
    _, rated = resolve(session, tenant, name, f"v{version}")
    RatingService(session).add(tenant, rated, prompt, completion, label=rating == "up")
    return redirect(f"/ui/adapters/{name}/versions/{version}", "rated")


@router.post("/{name}/versions/{version}/try")
async def try_out(
    visitor: Asker, request: Request, form: Fields, name: str, version: Version, state: State
) -> Response:
    """Continues a prompt with a version: as the stream of POST /v1/completions for a script, otherwise as a page."""
    tenant, prompt = visitor.principal.tenant, form.get("prompt", "")
    stream = EVENTS in request.headers.get("accept", "")
    try:
        completion_request = CompletionRequest.model_validate(
            {
                "model": f"{name}@v{version}",
                "prompt": prompt,
                "max_tokens": min(int(form.get("max_tokens") or TOKENS), TOKENS),
                "temperature": float(form.get("temperature") or 0),
                "stream": stream,
                "stream_options": {"include_usage": True} if stream else None,
            }
        )
    except (ValidationError, ValueError) as error:
        raise BadRequest("write a prompt, and numbers for tokens and temperature") from error
    generation = Generation(state, tenant, completion_request, _decides(visitor))
    if stream:
        return await event_stream(state, await generation.events(CompletionWriter(completion_request, generation)))
    text, problem = None, None
    try:
        text = (await cancelled_on_disconnect(request, generation.whole()))[0].text
    except MobizoError as error:
        if not visitor.may(Scope.ADAPTERS_READ):
            raise
        problem = error
    with state.database.reading() as session:
        at = resolve(session, tenant, name, f"v{version}")
        return _version_page(visitor, session, *at, problem, prompt=prompt, text=text)


def reason_of(form: Fields) -> str:
    """Returns the reason in a form. Raises BadRequest for one that is too long."""
    reason = form.get("reason", "").strip()
    if len(reason) > MAX_REASON:
        raise BadRequest(f"reason: has {len(reason)} characters; at most {MAX_REASON} are kept")
    return reason


@router.post("/{name}/versions/{version}/approve")
def approve(visitor: Writer, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Approves a held version."""
    DecisionService(session, visitor.principal, name).approve(f"v{version}", reason_of(form))
    return redirect(f"/ui/adapters/{name}/versions/{version}", "approved")


@router.post("/{name}/versions/{version}/delete")
def delete(visitor: Writer, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Deletes a version; it can be restored for some days."""
    DecisionService(session, visitor.principal, name).delete_version(f"v{version}", reason_of(form))
    return redirect(f"/ui/adapters/{name}", "deleted")


@router.post("/{name}/versions/{version}/promote")
def promote(visitor: Writer, form: Fields, name: str, version: Version, session: Writing) -> Response:
    """Makes an approved version `main`."""
    DecisionService(session, visitor.principal, name).promote(f"v{version}", reason_of(form))
    return redirect(f"/ui/adapters/{name}/versions/{version}", "promoted")
