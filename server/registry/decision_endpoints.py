"""Routes of decisions about adapters and versions, and of the rules that approve new versions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Query
from sqlalchemy.orm import Session

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.registry.decisions import DecisionService
from server.registry.endpoints import ABSENT, Reader, Version
from server.registry.models import StoredVersion
from server.registry.repository import find_adapter
from server.registry.service import AdapterService, ApprovalService, removed_after
from server.web.openapi import raises
from server.web.routes import Routes
from server.web.state import AppState, Reading, State, Writing
from shared.access import Scope
from shared.errors import AdapterNotFound, Conflict
from shared.protocol import AdapterVersion, AdapterView
from shared.registry import Decision, Promotion, RuleChange, RuleView

router = Routes(prefix="/v1", tags=["adapters"])
Writer = Annotated[Principal, needs(Scope.ADAPTERS_WRITE)]
Why = Annotated[Decision | None, Body()]
Reason = Annotated[str, Query(max_length=1000, description="for the audit trail")]
DECIDED = raises(*ABSENT, Conflict)


def _view(state: AppState, session: Session, decisions: DecisionService) -> AdapterView:
    return AdapterService(session).view(decisions.adapter, state.settings.adapter_grace)


def _version_view(state: AppState, decisions: DecisionService, version: StoredVersion) -> AdapterVersion:
    return version.view(decisions.adapter, removed_after(version.deleted_at, state.settings.adapter_grace))


@router.post("/adapters/{name}/promote", responses=DECIDED)
def promote_version(principal: Writer, name: str, promotion: Promotion, state: State, session: Writing) -> AdapterView:
    """Makes an approved version `main`, such as the one that was it before. The next approval moves `main` on."""
    decisions = DecisionService(session, principal, name)
    decisions.promote(promotion.revision, promotion.reason)
    return _view(state, session, decisions)


@router.delete("/adapters/{name}", responses=raises(AdapterNotFound))
def delete_adapter(principal: Writer, name: str, state: State, session: Writing, reason: Reason = "") -> AdapterView:
    """Deletes an adapter with its versions; it can be restored until `removed_after`."""
    decisions = DecisionService(session, principal, name)
    decisions.delete(reason)
    return _view(state, session, decisions)


@router.post("/adapters/{name}/undelete", responses=raises(AdapterNotFound))
def undelete_adapter(principal: Writer, name: str, state: State, session: Writing, why: Why = None) -> AdapterView:
    """Restores a deleted adapter."""
    decisions = DecisionService(session, principal, name, deleted=True)
    decisions.undelete(why.reason if why else "")
    return _view(state, session, decisions)


@router.post("/adapters/{name}/versions/{version}/approve", responses=raises(*ABSENT))
def approve_version(
    principal: Writer, name: str, version: Version, state: State, session: Writing, why: Why = None
) -> AdapterVersion:
    """Approves a held version; it becomes `main` if no later version was approved."""
    decisions = DecisionService(session, principal, name)
    return _version_view(state, decisions, decisions.approve(f"v{version}", why.reason if why else ""))


@router.delete("/adapters/{name}/versions/{version}", responses=raises(*ABSENT))
def delete_version(
    principal: Writer, name: str, version: Version, state: State, session: Writing, reason: Reason = ""
) -> AdapterVersion:
    """Deletes a version; it can be restored until `removed_after`."""
    decisions = DecisionService(session, principal, name)
    return _version_view(state, decisions, decisions.delete_version(f"v{version}", reason))


@router.post("/adapters/{name}/versions/{version}/undelete", responses=raises(*ABSENT))
def undelete_version(
    principal: Writer, name: str, version: Version, state: State, session: Writing, why: Why = None
) -> AdapterVersion:
    """Restores a deleted version with its former state."""
    decisions = DecisionService(session, principal, name)
    restored = decisions.undelete_version(f"v{version}", why.reason if why else "")
    return _version_view(state, decisions, restored)


@router.get("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def get_adapter_rule(principal: Reader, name: str, session: Reading) -> RuleView:
    """Shows the rule that approves the adapter's new versions."""
    return ApprovalService(session).of_adapter(find_adapter(session, principal.tenant, name))


@router.put("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def set_adapter_rule(principal: Writer, name: str, change: RuleChange, session: Writing) -> RuleView:
    """Sets the adapter's own rule for future versions; null: the tenant's rule applies."""
    decisions, approval = DecisionService(session, principal, name), ApprovalService(session)
    decisions.rule(change.rule)
    return approval.of_adapter(decisions.adapter)


@router.get("/approval-rule")
def get_approval_rule(principal: Reader, session: Reading) -> RuleView:
    """Shows the rule of adapters without a rule of their own."""
    return ApprovalService(session).of_tenant(principal.tenant)


@router.put("/approval-rule")
def set_approval_rule(principal: Writer, change: RuleChange, session: Writing) -> RuleView:
    """Sets the tenant's rule for future versions; null: the server's rule applies."""
    approval = ApprovalService(session)
    approval.set_tenant_rule(principal.tenant, change.rule)
    return approval.of_tenant(principal.tenant)
