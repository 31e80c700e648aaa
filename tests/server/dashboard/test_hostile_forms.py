"""What a hostile form or address costs the pages, by the bounds of docs/routes.md."""

import re
import threading
from urllib.parse import urlencode

import pytest

from server.app import create_app
from server.dashboard.routes import PageRoute
from server.web.routes import BodyKind
from shared.access import Role
from tests.docs.server_pages import COSTS
from tests.server.actors import serving
from tests.server.dashboard.people import FIELD, Person
from tests.server.web.test_hostile_requests import QUERY, Meter, path_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REFUSED_OR_DONE = {200, 303, 400, 401, 403, 404, 409, 413, 415, 422}


def test_hostile_forms_and_addresses_cost_a_page_no_more_than_its_bound(home):
    app = create_app(home.settings)
    before = set(threading.enumerate())
    with serving(app) as url, Person(url) as person:
        (loop,) = set(threading.enumerate()) - before
        meter = Meter(loop)
        person.sign_in(home.token(Role.OPERATOR))
        for route in (route for route in app.routes if isinstance(route, PageRoute)):
            (method,) = route.methods
            limit = route.body_limit(home.settings) - 100
            if route.path.endswith(("/events", "/logout")):
                continue
            bodies = {"a query": None, "a path": None}
            if route.body_kind is BodyKind.FORM:
                (token, *_) = FIELD.findall(person.get("/").text)
                fields = {"many fields": b"a&" * (limit // 2 - 60), "one field": b"json=" + b"%5B" * (limit // 3 - 60)}
                bodies |= {name: body + b"&csrf=" + token.encode() for name, body in fields.items()}
                bodies["json"] = urlencode({"csrf": token, "json": "[" + "[]," * 4000 + "0]"}).encode()
            for name, body in bodies.items():
                path = path_of(route, "x" * 5000) if name == "a path" else re.sub("x$", "1", path_of(route))
                path = f"{path}?{QUERY}" if name == "a query" else path
                headers = {"Content-Type": "application/x-www-form-urlencoded"}

                def send(path=path, body=body, headers=headers, method=method):
                    return person.request(method, path, content=body, headers=headers)

                meter.check(f"{method} {route.path} {name}", send, COSTS[route.body_kind], REFUSED_OR_DONE)
    meter.report()
