"""Routes of the rules by which new versions are approved: a tenant's, and an adapter's own."""

from __future__ import annotations

from server.adapters.approval import ApprovalService
from server.adapters.changes import Writer, decisions_on
from server.adapters.endpoints import Reader
from server.adapters.resolution import find_adapter
from server.http.etags import IfMatch
from server.http.openapi import raises
from server.http.place import Reading, Writing
from server.http.routes import Routes
from shared.errors import AdapterNotFound
from shared.registry import RuleChange, RuleView

router = Routes(prefix="/v1", tags=["adapters"])


@router.get("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def adapter_rule(principal: Reader, name: str, session: Reading) -> RuleView:
    """The rule by which the adapter's new versions are approved."""
    return ApprovalService(session).of_adapter(find_adapter(session, principal.tenant, name))


@router.put("/adapters/{name}/rule", responses=raises(AdapterNotFound))
def put_adapter_rule(principal: Writer, name: str, change: RuleChange, session: Writing, match: IfMatch) -> RuleView:
    """Sets the adapter's own rule, for versions to come; null: as the tenant's."""
    decisions, approval = decisions_on(session, principal, name), ApprovalService(session)
    match.check(approval.of_adapter(decisions.adapter))
    decisions.rule(change.rule)
    return approval.of_adapter(decisions.adapter)


@router.get("/approval-rule")
def tenant_rule(principal: Reader, session: Reading) -> RuleView:
    """The rule for adapters that have none of their own."""
    return ApprovalService(session).of_tenant(principal.tenant)


@router.put("/approval-rule")
def put_tenant_rule(principal: Writer, change: RuleChange, session: Writing, match: IfMatch) -> RuleView:
    """Sets the tenant's rule, for versions to come; null: as the server's."""
    approval = ApprovalService(session)
    match.check(approval.of_tenant(principal.tenant))
    approval.keep_tenant_rule(principal.tenant, change.rule)
    return approval.of_tenant(principal.tenant)
