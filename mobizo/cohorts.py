"""The client's cohorts: made, joined, their rounds opened and closed. Knows their routes; HTTP is the transport's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mobizo.connection import Connection
from shared.cohort import CohortSettings, CohortView, MemberView, RoundView, UpdateView
from shared.errors import CohortNotFound, NotFound
from shared.job import NAME


class Cohorts(Connection):
    """Cohorts of one tenant. Methods raise CohortNotFound."""

    def create_cohort(self, settings: CohortSettings) -> CohortView:
        """Makes a cohort. Raises Conflict if the name is taken."""
        return CohortView.model_validate(
            self._make("/v1/cohorts", settings.model_dump(mode="json", exclude_unset=True))
        )

    def cohorts(self) -> Iterator[CohortView]:
        """Every cohort of the tenant, newest first."""
        for item in self._pages("/v1/cohorts"):
            yield CohortView.model_validate(item)

    def cohort(self, name: str) -> CohortView:
        """One cohort with its latest round."""
        return CohortView.model_validate(self._get(cohort_path(name)))

    def members(self, name: str) -> Iterator[MemberView]:
        """Who is in a cohort, newest first."""
        for item in self._pages(f"{cohort_path(name)}/members"):
            yield MemberView.model_validate(item)

    def join_cohort(self, name: str, user: str, device_id: str) -> MemberView:
        """Lets a user in with the device that trains for him. Raises NotFound, Conflict or Forbidden."""
        body = {"device": device_id}
        return MemberView.model_validate(self._transport.request("PUT", _member(name, user), json=body).json())

    def leave_cohort(self, name: str, user: str) -> None:
        """Lets a user out; what he sent to a round that has not ended does not count. Raises NotFound."""
        self._transport.request("DELETE", _member(name, user))

    def rounds(self, name: str) -> Iterator[RoundView]:
        """A cohort's rounds, newest first."""
        for item in self._pages(f"{cohort_path(name)}/rounds"):
            yield RoundView.model_validate(item)

    def round(self, name: str, number: int) -> RoundView:
        """One round. Raises RoundNotFound."""
        return RoundView.model_validate(self._get(f"{cohort_path(name)}/rounds/{number}"))

    def open_round(self, name: str) -> RoundView:
        """Asks every member's device for an update. Raises Conflict or VersionHeld."""
        return RoundView.model_validate(self._make(f"{cohort_path(name)}/rounds"))

    def close_round(self, name: str, number: int) -> RoundView:
        """Ends a round now. Raises RoundNotFound."""
        path = f"{cohort_path(name)}/rounds/{number}/close"
        return RoundView.model_validate(self._transport.request("POST", path).json())

    def updates(self, name: str, number: int) -> Iterator[UpdateView]:
        """Each member's part in a round, newest first. Raises RoundNotFound."""
        for item in self._pages(f"{cohort_path(name)}/rounds/{number}/updates"):
            yield UpdateView.model_validate(item)


def cohort_path(name: str) -> str:
    """A cohort's route. Raises CohortNotFound for what is no name."""
    if not re.fullmatch(NAME, name):
        raise CohortNotFound(f"there is no cohort {name!r}")
    return f"/v1/cohorts/{name}"


def _member(name: str, user: str) -> str:
    if not re.fullmatch(NAME, user):
        raise NotFound(f"{user!r} is no user's name")
    return f"{cohort_path(name)}/members/{user}"
