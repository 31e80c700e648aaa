"""Routes of the rules that approve new versions: of a tenant, and of one adapter."""

from __future__ import annotations

from server.registry.decision_endpoints import Writer, decisions_on
from server.registry.endpoints import Reader
from server.registry.repository import find_adapter
from server.registry.service import ApprovalService
from server.web.openapi import raises
from server.web.routes import IfMatch, Routes
from server.web.state import Reading, Writing
from shared.errors import AdapterNotFound
from shared.registry import RuleChange, RuleView

router = Routes(prefix="/v1", tags=["adapters"])


@router.get("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def adapter_rule(principal: Reader, name: str, session: Reading) -> RuleView:
    """Shows the rule that approves the adapter's new versions."""
    return ApprovalService(session).of_adapter(find_adapter(session, principal.tenant, name))


@router.put("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def put_adapter_rule(principal: Writer, name: str, change: RuleChange, session: Writing, match: IfMatch) -> RuleView:
    """Sets the adapter's own rule for future versions; null: the tenant's rule applies."""
    decisions, approval = decisions_on(session, principal, name), ApprovalService(session)
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
    approval.keep_tenant_rule(principal.tenant, change.rule)
    return approval.of_tenant(principal.tenant)
