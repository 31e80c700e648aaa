"""Direct routes answer as FastAPI does: with the same bytes and headers, for good requests and bad ones."""

import pytest
from fastapi import Depends, Query
from pydantic import BaseModel

from server.app import create_app
from server.jobs.leases.endpoints import router
from server.web.direct import DirectRoute, Shortcut
from server.web.routes import Routes
from tests.server.conftest import serving

REPORT = {"datasets": ["movies"]}
BEAT = {"phase": "training", "step": 1, "steps": 3, "loss": 0.5}
JSON = {"content-type": "application/json"}
PASSING = ("date", "x-request-id")  # headers that differ from request to request


@pytest.fixture
def ordinary(home, fleet, standing, device):
    """The device again, before an application in which FastAPI answers everything."""
    app = create_app(home.settings)
    app.user_middleware = [middleware for middleware in app.user_middleware if middleware.cls is not Shortcut]
    app.state.mobizo = standing[0].state.mobizo
    with serving(app) as url:
        actor = fleet.actor(device.token, device.signer)
        actor.base_url = url
        yield actor


def told(response):
    """All that a response says, without what differs from request to request."""
    headers = {name: value for name, value in response.headers.items() if name not in PASSING}
    return response.status_code, headers, response.content


def test_the_routes_that_devices_call_while_they_train_are_direct():
    names = {route.name for route in router.routes if isinstance(route, DirectRoute)}
    assert names == {"acquire", "heartbeat", "leave", "fail", "release", "decline"}


@pytest.mark.parametrize(
    ("path", "how"),
    [
        ("", {"json": REPORT}),
        ("", {"json": {"datasets": ["books"]}}),
        ("", {}),
        ("", {"content": b"null", "headers": JSON}),
        ("", {"json": []}),
        ("", {"json": {}}),
        ("", {"json": {"datasets": "movies", "memory_bytes": "many", "color": "red"}}),
        ("", {"content": b'{"datasets": [', "headers": JSON}),
        ("", {"content": b'{"datasets": ["a"], "datasets": []}', "headers": JSON}),
        ("", {"content": b"\xff", "headers": JSON}),
        ("", {"content": b'{"datasets": []}', "headers": {"content-type": "text/plain"}}),
        ("", {"content": b'{"datasets": []}', "headers": JSON | {"content-encoding": "gzip"}}),
        ("", {"json": REPORT, "headers": {"authorization": "Bearer mz_nobody"}}),
        ("", {"json": REPORT, "headers": {"authorization": ""}}),
        ("", {"json": REPORT, "headers": {"signature": "no", "signature-input": "no", "content-digest": "no"}}),
        ("?color=red", {"json": REPORT}),
        ("/lease_none/heartbeat", {"json": BEAT}),
        ("/lease_none/heartbeat", {"json": {"step": -1}}),
        ("/lease_none/leave", {}),
        ("/lease_none/release", {"content": b"x" * 2000}),
        ("/lease%20none/release", {}),
        ("/a%2Fb/release", {}),
        ("/lease_none/fail", {"json": {"code": "broken", "detail": "it broke"}}),
        ("/lease_none/decline", {"json": {"needs_bytes": 1}}),
        ("/lease_none/unknown", {}),
    ],
)
def test_it_answers_as_the_framework_does(device, ordinary, lease, path, how):
    direct, plain = (client.post(f"/v1/leases{path}", **how) for client in (device, ordinary))
    if direct.status_code == 200:
        assert direct.json() | {"expires_at": ""} == plain.json() | {"expires_at": ""}
    else:
        assert told(direct) == told(plain)


def test_messages_about_a_lease_are_answered_as_by_the_framework(device, ordinary, lease):
    for name, body in (("heartbeat", BEAT), ("leave", None), ("heartbeat", BEAT), ("release", None), ("release", None)):
        path = f"/v1/leases/{lease['id']}/{name}"
        direct, plain = (client.post(path, json=body) for client in (device, ordinary))
        first, second = ({**response.json(), "expires_at": ""} for response in (direct, plain))
        assert (direct.status_code, first) == (plain.status_code, second)
        assert direct.headers["content-type"] == plain.headers["content-type"]


def test_requests_of_other_methods_are_left_to_the_router(device, ordinary):
    direct, plain = (client.get("/v1/leases") for client in (device, ordinary))
    assert direct.status_code == 405
    assert told(direct) == told(plain)


class Thing(BaseModel):
    name: str


def test_what_a_direct_route_cannot_take_is_refused():
    async def queried(color: str = Query()) -> Thing:
        return Thing(name=color)

    async def numbered(number: int) -> Thing:
        return Thing(name=str(number))

    async def nothing() -> None: ...

    def blocking() -> Thing:
        return Thing(name="a")

    def depended() -> str:
        return "a"

    async def depending(name: str = Depends(depended)) -> Thing:
        return Thing(name=name)

    routes = Routes(DirectRoute)
    for path, endpoint, reason in (
        ("/things", queried, "cannot call"),
        ("/things", blocking, "cannot call"),
        ("/things/{number}", numbered, "strings only"),
        ("/things", nothing, "answers with a model"),
        ("/things", depending, "cannot call"),
    ):
        with pytest.raises(TypeError, match=reason):
            routes.post(path)(endpoint)
