"""People who sign in at a real server, with and without a browser."""

import re
import shutil

import httpx
import pytest

from server.identity.tokens import TokenService
from shared.access import Role
from tests.server.actors import TLS
from tests.server.dashboard.seed import populate

FIELD = re.compile(r'name="csrf" value="([0-9a-f]+)"')
CHROMIUM = shutil.which("chromium")


class Person(httpx.Client):
    """A browser without JavaScript: it keeps cookies and sends forms, each with the CSRF token of a page."""

    def __init__(self, url):
        super().__init__(base_url=url, timeout=60, verify=TLS)

    def sign_in(self, token, target="/"):
        """The answer to the login form."""
        page = self.get("/ui/login", params={"next": target})
        return self.send_form("/ui/login", page, token=token, next=target)

    def send_form(self, path, page, **fields):
        """Posts a form that is on `page`, the answer that holds it."""
        (token, *_) = FIELD.findall(page.text)
        origin = {"Referer": str(page.url)}
        return self.post(path, data={"csrf": token, **fields}, headers=origin)

    def act(self, path, on="/", **fields):
        """Posts a form from the page at `on`."""
        return self.send_form(path, self.get(on), **fields)


@pytest.fixture
def person(fleet):
    """Makes people with a session: of a role, a tenant and, if given, of these scopes only."""
    people = []

    def make(role=Role.OPERATOR, tenant="default", scopes=None, sign_in=True):
        token = fleet.home.token(role, tenant)
        if scopes is not None:
            with fleet.home.database.writing() as session:
                token = TokenService(session).issue(role, tenant, "", scopes=scopes)[1]
        found = Person(fleet.url)
        found.token = token
        people.append(found)
        if sign_in:
            assert found.sign_in(token).status_code == 303
        return found

    yield make
    for found in people:
        found.close()


@pytest.fixture
def stocked(fleet):
    """The server with jobs, devices, versions and a cohort: (fleet, device that trains, its lease)."""
    return fleet, *populate(fleet)
