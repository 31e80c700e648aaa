"""Routes that change the adapter registry: what people decide of adapters and versions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Path, Query
from pydantic import AfterValidator
from sqlalchemy.orm import Session

from server.adapters.audit import Actor
from server.adapters.decisions import DecisionService
from server.adapters.endpoints import ABSENT, Version
from server.adapters.models import StoredVersion
from server.adapters.service import AdapterService, removed_after
from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.etags import IfMatch, Precondition
from server.http.idempotency import Once
from server.http.openapi import raises
from server.http.place import Here, Place, Writing
from server.http.routes import Routes
from shared.errors import AdapterNotFound, Conflict
from shared.protocol import AdapterVersion, AdapterView
from shared.registry import Decision, Deprecation, Promotion, Rollback, Tagging, check_tag

router = Routes(prefix="/v1/adapters", tags=["adapters"])
Writer = Annotated[Principal, needs(Scope.ADAPTERS_WRITE)]
Why = Annotated[Decision | None, Body()]
Reason = Annotated[str, Query(max_length=1000, description="for the audit trail")]
Tag = Annotated[str, Path(max_length=96), AfterValidator(check_tag)]
DECIDED = raises(*ABSENT, Conflict)


def decisions_on(session: Session, principal: Principal, name: str, *, deleted: bool = False) -> DecisionService:
    """Decisions of whoever makes a request, about one adapter. Raises AdapterNotFound."""
    return DecisionService(session, Actor.of(principal), principal.tenant, name, deleted=deleted)


def _view(here: Place, session: Session, decisions: DecisionService) -> AdapterView:
    return AdapterService(session).view(decisions.adapter, here.settings.adapter_grace)


def _version_view(here: Place, decisions: DecisionService, version: StoredVersion) -> AdapterVersion:
    return version.view(decisions.adapter, removed_after(version.deleted_at, here.settings.adapter_grace))


def _check(here: Place, decisions: DecisionService, precondition: Precondition, version: int) -> str:
    """The version as a revision, once If-Match holds for it."""
    revision = f"v{version}"
    if precondition.tags is not None:
        precondition.check(_version_view(here, decisions, decisions.find(revision)))
    return revision


@router.post("/{name}/promote", responses=DECIDED)
def promote(
    principal: Writer, name: str, promotion: Promotion, here: Here, session: Writing, match: IfMatch
) -> AdapterView:
    """Makes an approved version `main`."""
    decisions = decisions_on(session, principal, name)
    match.check(_view(here, session, decisions))
    decisions.promote(promotion.revision, promotion.reason)
    return _view(here, session, decisions)


@router.post("/{name}/rollback", responses=DECIDED)
def rollback(
    principal: Writer, name: str, asked: Rollback, here: Here, session: Writing, match: IfMatch, once: Once
) -> AdapterView:
    """Makes an earlier version `main` again: the one before, unless another is named. The next approval moves it on."""
    decisions = decisions_on(session, principal, name)
    match.check(_view(here, session, decisions))
    decisions.roll_back(asked.revision, asked.reason)
    return _view(here, session, decisions)


@router.delete("/{name}", responses=raises(AdapterNotFound))
def delete(
    principal: Writer, name: str, here: Here, session: Writing, match: IfMatch, reason: Reason = ""
) -> AdapterView:
    """Deletes an adapter with its versions; it can be taken back until `removed_after`."""
    decisions = decisions_on(session, principal, name)
    match.check(_view(here, session, decisions))
    decisions.delete(reason)
    return _view(here, session, decisions)


@router.post("/{name}/undelete", responses=raises(AdapterNotFound))
def undelete(principal: Writer, name: str, here: Here, session: Writing, why: Why = None) -> AdapterView:
    """Takes a deleted adapter back."""
    decisions = decisions_on(session, principal, name, deleted=True)
    decisions.undelete(why.reason if why else "")
    return _view(here, session, decisions)


@router.put("/{name}/tags/{tag}", responses=DECIDED)
def put_tag(
    principal: Writer, name: str, tag: Tag, tagging: Tagging, here: Here, session: Writing, match: IfMatch
) -> AdapterView:
    """Puts a tag on a version, or moves it there."""
    decisions = decisions_on(session, principal, name)
    match.check(_view(here, session, decisions))
    decisions.tag(tag, tagging.revision, tagging.reason)
    return _view(here, session, decisions)


@router.delete("/{name}/tags/{tag}", responses=raises(*ABSENT))
def delete_tag(
    principal: Writer, name: str, tag: Tag, here: Here, session: Writing, match: IfMatch, reason: Reason = ""
) -> AdapterView:
    """Takes a tag away."""
    decisions = decisions_on(session, principal, name)
    match.check(_view(here, session, decisions))
    decisions.untag(tag, reason)
    return _view(here, session, decisions)


@router.post("/{name}/versions/{version}/approve", responses=raises(*ABSENT))
def approve(
    principal: Writer, name: str, version: Version, here: Here, session: Writing, match: IfMatch, why: Why = None
) -> AdapterVersion:
    """Approves a held or deprecated version; it becomes `main` if no later one was approved."""
    decisions = decisions_on(session, principal, name)
    revision = _check(here, decisions, match, version)
    return _version_view(here, decisions, decisions.approve(revision, why.reason if why else ""))


@router.post("/{name}/versions/{version}/reject", responses=DECIDED)
def reject(
    principal: Writer, name: str, version: Version, here: Here, session: Writing, match: IfMatch, why: Why = None
) -> AdapterVersion:
    """Deletes a held version; it can be taken back until `removed_after`."""
    decisions = decisions_on(session, principal, name)
    revision = _check(here, decisions, match, version)
    return _version_view(here, decisions, decisions.reject(revision, why.reason if why else ""))


@router.post("/{name}/versions/{version}/deprecate", responses=DECIDED)
def deprecate(
    principal: Writer,
    name: str,
    version: Version,
    deprecation: Deprecation,
    here: Here,
    session: Writing,
    match: IfMatch,
) -> AdapterVersion:
    """Warns of a version; it can still be had. `main` moves to the latest approved one, if there is another."""
    decisions = decisions_on(session, principal, name)
    revision = _check(here, decisions, match, version)
    found = decisions.deprecate(revision, deprecation.message, deprecation.reason)
    return _version_view(here, decisions, found)


@router.delete("/{name}/versions/{version}", responses=raises(*ABSENT))
def delete_version(
    principal: Writer, name: str, version: Version, here: Here, session: Writing, match: IfMatch, reason: Reason = ""
) -> AdapterVersion:
    """Deletes a version; it can be taken back until `removed_after`."""
    decisions = decisions_on(session, principal, name)
    revision = _check(here, decisions, match, version)
    return _version_view(here, decisions, decisions.delete_version(revision, reason))


@router.post("/{name}/versions/{version}/undelete", responses=raises(*ABSENT))
def undelete_version(
    principal: Writer, name: str, version: Version, here: Here, session: Writing, why: Why = None
) -> AdapterVersion:
    """Takes a deleted version back, as it was."""
    decisions = decisions_on(session, principal, name)
    found = decisions.undelete_version(f"v{version}", why.reason if why else "")
    return _version_view(here, decisions, found)
