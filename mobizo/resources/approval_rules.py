"""`client.approval_rules`: the rules by which new adapter versions are approved automatically."""

from __future__ import annotations

from mobizo.adapter_paths import adapter_path
from mobizo.connection import Resource
from shared.registry import ApprovalRule, RuleView


class ApprovalRules(Resource):
    """Approval rules of the tenant and of single adapters. All methods raise AdapterNotFound.

    name: the adapter; None: the tenant's rule, which applies to adapters without a rule of their own.
    """

    def get(self, name: str | None = None) -> RuleView:
        """Returns the rule that applies, and whether the adapter, the tenant or the server defines it."""
        return self._connection.get(RuleView, _rule_path(name))

    def set(self, rule: ApprovalRule | None, name: str | None = None) -> RuleView:
        """Sets a rule and returns the rule that now applies. rule: None removes the adapter's or the tenant's rule."""
        body = {"rule": None if rule is None else rule.model_dump(mode="json")}
        return self._connection.send(RuleView, "PUT", _rule_path(name), body)


def _rule_path(name: str | None) -> str:
    return "/v1/approval-rule" if name is None else f"{adapter_path(name)}/rule"
