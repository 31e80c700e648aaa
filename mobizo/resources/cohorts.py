"""`client.cohorts`: cohorts, their members and their rounds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mobizo.connection import Resource
from shared.errors import CohortNotFound, NotFound
from shared.federation.cohort import CohortSettings, CohortView, MemberView, RoundView, UpdateView
from shared.job import NAME


class Cohorts(Resource):
    """Cohorts of the tenant. Methods with a cohort's `name` raise CohortNotFound if it does not exist."""

    def create(self, settings: CohortSettings) -> CohortView:
        """Creates a cohort. Raises Conflict if the name is taken."""
        body = settings.model_dump(mode="json", exclude_unset=True)
        return self._connection.create(CohortView, "/v1/cohorts", body)

    def list(self) -> Iterator[CohortView]:
        """Yields all cohorts of the tenant, newest first."""
        return self._connection.pages(CohortView, "/v1/cohorts")

    def get(self, name: str) -> CohortView:
        """Returns a cohort with its settings and its latest round."""
        return self._connection.get(CohortView, cohort_path(name))

    def members(self, name: str) -> Iterator[MemberView]:
        """Yields the members of a cohort, newest first."""
        return self._connection.pages(MemberView, f"{cohort_path(name)}/members")

    def add_member(self, name: str, user: str, device_id: str) -> MemberView:
        """Adds a user to a cohort, from the next round on. device_id: the device that trains for the user.

        Raises NotFound for an unknown device or an invalid user name, Conflict or Forbidden.
        """
        return self._connection.send(MemberView, "PUT", _member_path(name, user), {"device": device_id})

    def remove_member(self, name: str, user: str) -> None:
        """Removes a user from a cohort. The user's update in an unfinished round is discarded. Raises NotFound."""
        self._connection.transport.request("DELETE", _member_path(name, user))

    def rounds(self, name: str) -> Iterator[RoundView]:
        """Yields the rounds of a cohort, newest first."""
        return self._connection.pages(RoundView, f"{cohort_path(name)}/rounds")

    def round(self, name: str, number: int) -> RoundView:
        """Returns one round. Raises RoundNotFound."""
        return self._connection.get(RoundView, f"{cohort_path(name)}/rounds/{number}")

    def open_round(self, name: str) -> RoundView:
        """Opens a round, in which the device of each member is asked for an update.

        Raises Conflict if a round is open or the cohort has too few members, VersionHeld if its latest version is held.
        """
        return self._connection.create(RoundView, f"{cohort_path(name)}/rounds")

    def close_round(self, name: str, number: int) -> RoundView:
        """Closes a round now, with the updates received so far. No further round opens automatically.

        Raises RoundNotFound.
        """
        return self._connection.send(RoundView, "POST", f"{cohort_path(name)}/rounds/{number}/close")

    def updates(self, name: str, number: int) -> Iterator[UpdateView]:
        """Yields the state of each member's update in a round, newest first. Raises RoundNotFound."""
        return self._connection.pages(UpdateView, f"{cohort_path(name)}/rounds/{number}/updates")


def cohort_path(name: str) -> str:
    """Returns the path of a cohort's routes. Raises CohortNotFound if `name` is not a valid name."""
    if not re.fullmatch(NAME, name):
        raise CohortNotFound(f"there is no cohort {name!r}")
    return f"/v1/cohorts/{name}"


def _member_path(name: str, user: str) -> str:
    if not re.fullmatch(NAME, user):
        raise NotFound(f"{user!r} is not a valid user name")
    return f"{cohort_path(name)}/members/{user}"
