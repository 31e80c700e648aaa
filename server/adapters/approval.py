"""The rules by which new versions are approved or held: an adapter's, else its tenant's, else the server's.

Knows no HTTP.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.models import Adapter, TenantRule
from server.adapters.repository import AdapterRepository
from shared.job import Result
from shared.registry import ApprovalRule, Parent, RuleView


class ApprovalService:
    """Rules in one transaction."""

    def __init__(self, session: Session) -> None:
        self._adapters = AdapterRepository(session)

    def of_tenant(self, tenant: str) -> RuleView:
        """The rule for a tenant's adapters that have none of their own."""
        found = self._adapters.tenant_rule(tenant)
        if found is None:
            return RuleView(rule=ApprovalRule(), source="server")
        return RuleView(rule=found.rule, source="tenant")

    def of_adapter(self, adapter: Adapter) -> RuleView:
        """The rule for an adapter."""
        if adapter.rule is None:
            return self.of_tenant(adapter.tenant)
        return RuleView(rule=adapter.rule, source="adapter")

    def keep_tenant_rule(self, tenant: str, rule: ApprovalRule | None) -> None:
        """Sets a tenant's rule; None: as the server's."""
        if rule is None:
            self._adapters.forget_tenant_rule(tenant)
        else:
            self._adapters.keep_tenant_rule(TenantRule(tenant=tenant, rule=rule))

    def objection(self, adapter: Adapter, result: Result, parent: Parent | None) -> str | None:
        """Why a new version of the adapter is held, in words; None: it is approved."""
        return self.of_adapter(adapter).rule.objection(result, self._score(adapter.tenant, parent))

    def _score(self, tenant: str, parent: Parent | None) -> float | None:
        if parent is None:
            return None
        version = self._adapters.parent(tenant, parent.adapter, parent.revision)
        return None if version is None else version.result.tuned_accuracy
