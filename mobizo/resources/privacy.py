"""`client.privacy`: differential privacy spent by users and cohorts, and users' budgets."""

from __future__ import annotations

import re
from urllib.parse import quote

from mobizo.connection import Resource
from mobizo.resources.cohorts import cohort_path
from shared.errors import NotFound
from shared.job import NAME
from shared.privacy import DELTA, CohortPrivacy, DatasetPrivacy, PrivacyBudget, UserPrivacy


class Privacy(Resource):
    """Privacy accounting of the tenant. Methods with a `user` raise NotFound if it is not a valid user name."""

    def user(self, user: str) -> UserPrivacy:
        """Returns the epsilon that all jobs of a user have spent together, and the user's budget."""
        return self._connection.get(UserPrivacy, _user_path(user))

    def set_user_budget(self, user: str, epsilon: float | None, delta: float = DELTA) -> UserPrivacy:
        """Sets the epsilon that all jobs of a user may spend together. Requires an operator's token.

        epsilon: the budget; None removes it. delta: the probability with which the bound may fail.
        Raises Forbidden. Raises pydantic.ValidationError if epsilon or delta is out of range.
        """
        body = PrivacyBudget(epsilon=epsilon, delta=delta).model_dump(mode="json")
        return self._connection.send(UserPrivacy, "PUT", _user_path(user), body)

    def device(self, device_id: str) -> list[DatasetPrivacy]:
        """Returns the epsilon that runs have spent on each data set of a device. Raises NotFound."""
        return self._connection.get(list[DatasetPrivacy], f"/v1/devices/{quote(device_id, safe='')}/privacy")

    def cohort(self, cohort: str) -> CohortPrivacy:
        """Returns the epsilon that a cohort's rounds have spent per member and per example. Raises CohortNotFound."""
        return self._connection.get(CohortPrivacy, f"{cohort_path(cohort)}/privacy")


def _user_path(user: str) -> str:
    if not re.fullmatch(NAME, user):
        raise NotFound(f"{user!r} is not a valid user name")
    return f"/v1/users/{user}/privacy"
