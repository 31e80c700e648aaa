"""A request whose transaction met another's is done again, from its beginning and with its whole body."""

from fastapi import Depends, FastAPI
from pydantic import BaseModel

from server.database.columns import utc_now
from server.database.database import TRIES, Collision
from server.identity.signing_keys.service import load_key
from server.web.middleware import add_problem_handlers
from server.web.routes import Routes
from server.web.state import AppState
from tests.server.actors import Actor, assert_problem, serving


class Body(BaseModel):
    text: str


class Meeting:
    """Transactions, of which the first few meet another one: while they work, or as they are committed."""

    def __init__(self, failures, at_commit):
        self.remaining_failures, self.at_commit = failures, at_commit
        self.begun = self.committed = 0

    def transaction(self):
        self.begun += 1
        yield
        self.fail(at_commit=True)
        self.committed += 1

    def fail(self, at_commit):
        if self.at_commit == at_commit and self.remaining_failures > 0:
            self.remaining_failures -= 1
            raise Collision


def serve(meeting, home):
    app, routes = FastAPI(), Routes()
    key = load_key(home.settings.key_path)
    app.state.mobizo = AppState(home.settings, home.database, home.artifacts, key.public_key(), utc_now())
    transaction = Depends(meeting.transaction, scope="function")

    @routes.post("/things", dependencies=[transaction])
    def make(body: Body) -> Body:
        meeting.fail(at_commit=False)
        return body

    @routes.put("/things", dependencies=[transaction])
    def put() -> None:
        meeting.fail(at_commit=False)

    app.include_router(routes)
    add_problem_handlers(app)
    return serving(app)


def test_it_is_done_again_until_it_meets_nobody(home):
    for at_commit in (False, True):
        meeting = Meeting(TRIES - 1, at_commit)
        with serve(meeting, home) as url, Actor(url) as client:
            response = client.post("/things", json={"text": "x" * 1000})
        assert (response.status_code, response.json()) == (200, {"text": "x" * 1000})
        assert (meeting.begun, meeting.committed) == (TRIES, 1)


def test_it_is_given_up_in_the_end(home):
    meeting = Meeting(TRIES, at_commit=True)
    with serve(meeting, home) as url, Actor(url) as client:
        response = client.post("/things", json={"text": "x"})
    assert_problem(response, 503, "unavailable")
    assert response.headers["retry-after"]
    assert (meeting.begun, meeting.committed) == (TRIES, 0)


def test_a_stream_is_not_sent_twice(home):
    meeting = Meeting(1, at_commit=True)
    with serve(meeting, home) as url, Actor(url) as client:
        assert_problem(client.put("/things", content=b"x"), 503, "unavailable")
    assert meeting.begun == 1
