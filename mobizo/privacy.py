"""The client's privacy: what was spent on users' data and in cohorts, and users' budgets. Knows their routes."""

from __future__ import annotations

import re

from mobizo.cohorts import cohort_path
from mobizo.connection import Connection
from shared.errors import NotFound
from shared.job import NAME
from shared.privacy import DELTA, CohortPrivacy, PrivacyBudget, UserPrivacy


class Privacy(Connection):
    """Privacy of one tenant's users."""

    def user_privacy(self, user: str) -> UserPrivacy:
        """What all jobs together have spent on a user's data. Raises NotFound for what is no name."""
        return UserPrivacy.model_validate(self._get(_user(user)))

    def limit_privacy(self, user: str, epsilon: float | None, delta: float = DELTA) -> UserPrivacy:
        """Sets a user's budget (operator); None: no limit. Raises NotFound for what is no name."""
        body = PrivacyBudget(epsilon=epsilon, delta=delta).model_dump(mode="json")
        return UserPrivacy.model_validate(self._transport.request("PUT", _user(user), json=body).json())

    def cohort_privacy(self, cohort: str) -> CohortPrivacy:
        """What a cohort's rounds have spent on its members. Raises CohortNotFound."""
        return CohortPrivacy.model_validate(self._get(f"{cohort_path(cohort)}/privacy"))


def _user(user: str) -> str:
    if not re.fullmatch(NAME, user):
        raise NotFound(f"{user!r} is no user's name")
    return f"/v1/users/{user}/privacy"
