"""People who sign in at a real server."""

import pytest

from shared.access import Role
from tests.server.dashboard.people import Person
from tests.server.dashboard.seed import populate


@pytest.fixture
def person(fleet):
    """Makes people with a session: of a role, a tenant and, if given, of these scopes only."""
    people = []

    def make(role=Role.OPERATOR, tenant="default", scopes=None, sign_in=True):
        token = fleet.home.token(role, tenant, scopes=scopes)
        visitor = Person(fleet.url)
        visitor.token = token
        people.append(visitor)
        if sign_in:
            assert visitor.sign_in(token).status_code == 303
        return visitor

    yield make
    for visitor in people:
        visitor.close()


@pytest.fixture
def stocked(fleet):
    """The server with jobs, devices, versions and a cohort: (fleet, device that trains, its lease)."""
    return fleet, *populate(fleet, every=50)
