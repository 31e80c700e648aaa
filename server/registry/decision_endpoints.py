"""Routes of decisions about adapters and versions, and of the rules that approve new versions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Path, Query
from pydantic import AfterValidator
from sqlalchemy.orm import Session

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.registry.decisions import DecisionService
from server.registry.endpoints import ABSENT, Reader, Version
from server.registry.models import StoredVersion
from server.registry.repository import find_adapter
from server.registry.service import AdapterService, ApprovalService, removed_after
from server.web.idempotency import Once
from server.web.openapi import raises
from server.web.routes import IfMatch, Precondition, Routes
from server.web.state import AppState, Reading, State, Writing
from shared.access import Scope
from shared.errors import AdapterNotFound, Conflict
from shared.protocol import AdapterVersion, AdapterView
from shared.registry import Decision, Deprecation, Promotion, Rollback, RuleChange, RuleView, Tagging, check_tag

router = Routes(prefix="/v1", tags=["adapters"])
Writer = Annotated[Principal, needs(Scope.ADAPTERS_WRITE)]
Why = Annotated[Decision | None, Body()]
Reason = Annotated[str, Query(max_length=1000, description="for the audit trail")]
Tag = Annotated[str, Path(max_length=96), AfterValidator(check_tag)]
DECIDED = raises(*ABSENT, Conflict)


def _view(state: AppState, session: Session, decisions: DecisionService) -> AdapterView:
    return AdapterService(session).view(decisions.adapter, state.settings.adapter_grace)


def _version_view(state: AppState, decisions: DecisionService, version: StoredVersion) -> AdapterVersion:
    return version.view(decisions.adapter, removed_after(version.deleted_at, state.settings.adapter_grace))


def _check(state: AppState, decisions: DecisionService, precondition: Precondition, version: int) -> str:
    """Checks If-Match for a version and returns the version as a revision."""
    revision = f"v{version}"
    if precondition.tags is not None:
        precondition.check(_version_view(state, decisions, decisions.find(revision)))
    return revision


@router.post("/adapters/{name}/promote", responses=DECIDED)
def promote(
    principal: Writer, name: str, promotion: Promotion, state: State, session: Writing, match: IfMatch
) -> AdapterView:
    """Makes an approved version `main`."""
    decisions = DecisionService.of(session, principal, name)
    match.check(_view(state, session, decisions))
    decisions.promote(promotion.revision, promotion.reason)
    return _view(state, session, decisions)


@router.post("/adapters/{name}/rollback", responses=DECIDED)
def rollback(
    principal: Writer, name: str, request: Rollback, state: State, session: Writing, match: IfMatch, once: Once
) -> AdapterView:
    """Makes an earlier version `main` again, by default the previous one. The next approval moves `main` on."""
    decisions = DecisionService.of(session, principal, name)
    match.check(_view(state, session, decisions))
    decisions.roll_back(request.revision, request.reason)
    return _view(state, session, decisions)


@router.delete("/adapters/{name}", responses=raises(AdapterNotFound))
def delete(
    principal: Writer, name: str, state: State, session: Writing, match: IfMatch, reason: Reason = ""
) -> AdapterView:
    """Deletes an adapter with its versions; it can be restored until `removed_after`."""
    decisions = DecisionService.of(session, principal, name)
    match.check(_view(state, session, decisions))
    decisions.delete(reason)
    return _view(state, session, decisions)


@router.post("/adapters/{name}/undelete", responses=raises(AdapterNotFound))
def undelete(principal: Writer, name: str, state: State, session: Writing, why: Why = None) -> AdapterView:
    """Restores a deleted adapter."""
    decisions = DecisionService.of(session, principal, name, deleted=True)
    decisions.undelete(why.reason if why else "")
    return _view(state, session, decisions)


@router.put("/adapters/{name}/tags/{tag}", responses=DECIDED)
def put_tag(
    principal: Writer, name: str, tag: Tag, tagging: Tagging, state: State, session: Writing, match: IfMatch
) -> AdapterView:
    """Tags a version, or moves the tag to it."""
    decisions = DecisionService.of(session, principal, name)
    match.check(_view(state, session, decisions))
    decisions.tag(tag, tagging.revision, tagging.reason)
    return _view(state, session, decisions)


@router.delete("/adapters/{name}/tags/{tag}", responses=raises(*ABSENT))
def delete_tag(
    principal: Writer, name: str, tag: Tag, state: State, session: Writing, match: IfMatch, reason: Reason = ""
) -> AdapterView:
    """Removes a tag."""
    decisions = DecisionService.of(session, principal, name)
    match.check(_view(state, session, decisions))
    decisions.untag(tag, reason)
    return _view(state, session, decisions)


@router.post("/adapters/{name}/versions/{version}/approve", responses=raises(*ABSENT))
def approve(
    principal: Writer, name: str, version: Version, state: State, session: Writing, match: IfMatch, why: Why = None
) -> AdapterVersion:
    """Approves a held or deprecated version; it becomes `main` if no later version was approved."""
    decisions = DecisionService.of(session, principal, name)
    revision = _check(state, decisions, match, version)
    return _version_view(state, decisions, decisions.approve(revision, why.reason if why else ""))


@router.post("/adapters/{name}/versions/{version}/reject", responses=DECIDED)
def reject(
    principal: Writer, name: str, version: Version, state: State, session: Writing, match: IfMatch, why: Why = None
) -> AdapterVersion:
    """Deletes a held version; it can be restored until `removed_after`."""
    decisions = DecisionService.of(session, principal, name)
    revision = _check(state, decisions, match, version)
    return _version_view(state, decisions, decisions.reject(revision, why.reason if why else ""))


@router.post("/adapters/{name}/versions/{version}/deprecate", responses=DECIDED)
def deprecate(
    principal: Writer,
    name: str,
    version: Version,
    deprecation: Deprecation,
    state: State,
    session: Writing,
    match: IfMatch,
) -> AdapterVersion:
    """Deprecates a version, which can still be downloaded. `main` moves to the latest approved version, if any."""
    decisions = DecisionService.of(session, principal, name)
    revision = _check(state, decisions, match, version)
    deprecated = decisions.deprecate(revision, deprecation.message, deprecation.reason)
    return _version_view(state, decisions, deprecated)


@router.delete("/adapters/{name}/versions/{version}", responses=raises(*ABSENT))
def delete_version(
    principal: Writer, name: str, version: Version, state: State, session: Writing, match: IfMatch, reason: Reason = ""
) -> AdapterVersion:
    """Deletes a version; it can be restored until `removed_after`."""
    decisions = DecisionService.of(session, principal, name)
    revision = _check(state, decisions, match, version)
    return _version_view(state, decisions, decisions.delete_version(revision, reason))


@router.post("/adapters/{name}/versions/{version}/undelete", responses=raises(*ABSENT))
def undelete_version(
    principal: Writer, name: str, version: Version, state: State, session: Writing, why: Why = None
) -> AdapterVersion:
    """Restores a deleted version with its former state."""
    decisions = DecisionService.of(session, principal, name)
    restored = decisions.undelete_version(f"v{version}", why.reason if why else "")
    return _version_view(state, decisions, restored)


@router.get("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def adapter_rule(principal: Reader, name: str, session: Reading) -> RuleView:
    """Shows the rule that approves the adapter's new versions."""
    return ApprovalService(session).of_adapter(find_adapter(session, principal.tenant, name))


@router.put("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def put_adapter_rule(principal: Writer, name: str, change: RuleChange, session: Writing, match: IfMatch) -> RuleView:
    """Sets the adapter's own rule for future versions; null: the tenant's rule applies."""
    decisions, approval = DecisionService.of(session, principal, name), ApprovalService(session)
    match.check(approval.of_adapter(decisions.adapter))
    decisions.rule(change.rule)
    return approval.of_adapter(decisions.adapter)


@router.get("/approval-rule")
def tenant_rule(principal: Reader, session: Reading) -> RuleView:
    """Shows the rule of adapters without a rule of their own."""
    return ApprovalService(session).of_tenant(principal.tenant)


@router.put("/approval-rule")
def put_tenant_rule(principal: Writer, change: RuleChange, session: Writing, match: IfMatch) -> RuleView:
    """Sets the tenant's rule for future versions; null: the server's rule applies."""
    approval = ApprovalService(session)
    match.check(approval.of_tenant(principal.tenant))
    approval.set_tenant_rule(principal.tenant, change.rule)
    return approval.of_tenant(principal.tenant)
