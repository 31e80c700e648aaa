"""The client's privacy: what was spent on users' data and in cohorts, and users' budgets. Knows their routes."""

from __future__ import annotations

from mobizo.connection import Connection
from shared.privacy import DELTA, CohortPrivacy, PrivacyBudget, UserPrivacy


class Privacy(Connection):
    """Privacy of one tenant's users."""

    def user_privacy(self, user: str) -> UserPrivacy:
        """What all jobs together have spent on a user's data."""
        return UserPrivacy.model_validate(self._get(f"/v1/users/{user}/privacy"))

    def limit_privacy(self, user: str, epsilon: float | None, delta: float = DELTA) -> UserPrivacy:
        """Sets a user's budget (operator); None: no limit."""
        body = PrivacyBudget(epsilon=epsilon, delta=delta).model_dump(mode="json")
        return UserPrivacy.model_validate(self._transport.request("PUT", f"/v1/users/{user}/privacy", json=body).json())

    def cohort_privacy(self, cohort: str) -> CohortPrivacy:
        """What a cohort's rounds have spent on its members."""
        return CohortPrivacy.model_validate(self._get(f"/v1/cohorts/{cohort}/privacy"))
