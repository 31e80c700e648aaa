"""What one hostile request costs each route: CPU time of the process and of its event loop, and memory."""

import gc
import re
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from urllib.parse import urlencode

import pytest

from server.app import create_app
from server.web.routes import BodyKind, Route
from tests.docs.server_pages import COSTS, Cost
from tests.server.actors import Fleet, serving
from tests.server.web.hostile import Bodies

DATABASES = ("sqlite",)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXPECTED_STATUSES = {200, 201, 202, 204, 400, 403, 404, 409, 410, 413, 415, 422}
QUERY = urlencode({"cursor": "x" * 20_000, "limit": "9" * 20_000, "state": "x" * 10_000})


class Meter:
    """Measures one request at a time in this process, which is also the server's and the client's."""

    def __init__(self, loop):
        """loop: the thread of the server's event loop."""
        self._clock = time.pthread_getcpuclockid(loop.ident)
        self._exceeded, self._worst = {}, []

    def cost(self, request):
        """(what the request costs, its response)"""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        before = _memory("VmRSS")
        cpu, loop = time.process_time(), time.clock_gettime(self._clock)
        response = request()
        times = time.process_time() - cpu, time.clock_gettime(self._clock) - loop
        return Cost(*times, _memory("VmHWM") - before), response

    def check(self, where, request, bound, statuses):
        """Sends a request that must have one of these statuses, and compares its cost with its bound."""
        cost, response = self.cost(request)
        assert response.status_code in statuses, (where, response.text[:200])
        self._worst.append((cost, f"{where} {response.status_code}"))
        if over := {name: value for name, value in vars(cost).items() if value > getattr(bound, name)}:
            self._exceeded[where] = over

    def report(self):
        """Fails with what was over its bound; shows the worst costs of each kind."""
        for name in ("cpu_seconds", "loop_seconds", "memory_bytes"):
            for cost, where in sorted(self._worst, key=lambda pair: -getattr(pair[0], name))[:6]:
                sys.stderr.write(f"{name} {getattr(cost, name):.4g}: {where}\n")
        assert self._exceeded == {}


def _memory(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.fixture
def siege(home):
    """A server with its limits at their defaults: (routes, their bodies, meter, a client of each kind)."""
    app = create_app(home.settings)
    before = set(threading.enumerate())
    with serving(app) as url:
        (loop,) = set(threading.enumerate()) - before
        fleet = Fleet(home, url)
        clients = [fleet.operator(), fleet.device()]
        document = app.openapi()
        routes = [route for route in app.routes if isinstance(route, Route) and route.include_in_schema]
        # The objects of other tests in this process are not the server's: looking through them takes 0.3 s.
        gc.collect()
        gc.freeze()
        yield home.settings, document, routes, Meter(loop), clients
        gc.unfreeze()
        fleet.close()


def admitted(clients, method, path):
    """The client that the route lets in."""
    return next(each for each in clients if each.request(method, path).status_code not in (401, 403))


def path_of(route, value="x"):
    return re.sub(r"\{[^}]*\}", value, route.path)


def test_hostile_bodies_cost_every_json_route_no_more_than_its_bound(siege):
    settings, document, routes, meter, clients = siege
    routes = [route for route in routes if route.body_kind is BodyKind.JSON]
    assert len(routes) > 25
    by_limit = {}
    for route in routes:
        (method,) = route.methods
        operation = document["paths"][route.path.replace(":path}", "}")][method.lower()]
        client = admitted(clients, method, path_of(route))
        limit = route.body_limit(settings)
        shared = [] if limit in by_limit else by_limit.setdefault(limit, Bodies(document, limit)).any()
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        for name, body in chain(shared, by_limit[limit].of(schema)):
            assert len(body) <= limit

            def send(body=body):
                headers = {"Content-Type": "application/json"}
                return client.request(method, path_of(route), content=body, headers=headers)  # noqa: B023

            meter.check(f"{method} {route.path} {name}", send, COSTS[BodyKind.JSON], EXPECTED_STATUSES)
    meter.report()


def test_hostile_forms_and_addresses_cost_no_more_than_their_bound(siege):
    settings, _, routes, meter, clients = siege
    for route in routes:
        if route.body_kind not in (BodyKind.FORM, BodyKind.NONE) or route.path.endswith("/events"):
            continue
        (method,) = route.methods
        requests = {"a query": (f"{path_of(route)}?{QUERY}", b""), "a path": (path_of(route, "x" * 5000), b"")}
        if route.body_kind is BodyKind.FORM:
            limit = route.body_limit(settings) - 10
            requests |= {
                "fields": (path_of(route), b"a&" * (limit // 2)),
                "one field": (path_of(route), b"paths=" + b"%41" * (limit // 3 - 6)),
                "one name": (path_of(route), b"paths=x&" * (limit // 8)),
            }
        client = clients[0] if route.path.startswith("/api") else admitted(clients, method, path_of(route))
        for name, (path, body) in requests.items():

            def send(path=path, body=body):
                headers = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
                return client.request(method, path, content=body, headers=headers)  # noqa: B023

            meter.check(f"{method} {route.path} {name}", send, COSTS[route.body_kind], EXPECTED_STATUSES)
    meter.report()
