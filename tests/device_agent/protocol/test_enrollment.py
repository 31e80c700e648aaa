"""Joining by a code, against a server that follows RFC 8628's text, and the command as a person uses it."""

import json
import signal
import subprocess
import threading
from urllib.parse import parse_qsl

import pytest

from device_agent.home import AgentHome
from device_agent.protocol.enrollment import request_enrollment
from shared.errors import Forbidden, MobizoError, Unauthorized
from shared.signing import fingerprint, key_id, new_private_key, parse_public, public_text
from shared.transport import Transport
from tests.device_agent.conftest import start_agent
from tests.device_agent.fake_server import FakeServer

SERVER_KEY = public_text(new_private_key().public_key())
AUTHORIZATION = {
    "device_code": "GmRhmhcxhwAzkoEqiMEg_DnyEysNkuNhszIySk9eS",
    "user_code": "WDJB-MJHT",
    "verification_uri": "https://example.com/device",
    "expires_in": 1800,
    "interval": 5,
    "some_extension": 1,
}
GRANTED = {
    "access_token": "the-token",
    "token_type": "Bearer",
    "device_id": "device_1",
    "server": {"version": "1", "public_key": SERVER_KEY, "key_id": key_id(parse_public(SERVER_KEY))},
}


class AuthorizationServer(FakeServer):
    """Answers each question for a token with the next of `answers`: an error's word, a grant, or None, which is 503."""

    def __init__(self, key):
        super().__init__(key)
        self.authorization, self.answers, self.forms = dict(AUTHORIZATION), [], []
        self.waiting = threading.Event()

    def answer(self, method, path, body, headers):
        assert headers["content-type"] == "application/x-www-form-urlencoded"
        self.forms.append((path, dict(parse_qsl(body.decode()))))
        if path.endswith("/device_authorization"):
            return 200, json.dumps(self.authorization).encode()
        self.waiting.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        status = 503 if answer is None else 200 if isinstance(answer, dict) else 400
        return status, json.dumps({"error": answer} if status == 400 else answer).encode()


@pytest.fixture
def server(server_key):
    with AuthorizationServer(server_key) as double:
        yield double


def join(server, *answers, **changes):
    """What `request_enrollment` returned, and how long it waited each time; only by that does time pass."""
    server.answers, waits, authorizations = list(answers), [], []
    server.authorization |= changes
    with Transport(server.url) as transport:
        clock = (waits.append, lambda: sum(waits))
        grant = request_enrollment(transport, "phone", SERVER_KEY, authorizations.append, *clock)
    assert [authorization.user_code for authorization in authorizations] == ["WDJB-MJHT"]
    return grant, waits


def test_it_asks_at_the_servers_pace_until_it_is_let_in(server):
    pending = "authorization_pending"
    grant, waits = join(server, pending, "slow_down", pending, "slow_down", pending, GRANTED)
    assert (grant.token, grant.device_id, grant.server.public_key) == ("the-token", "device_1", SERVER_KEY)
    assert waits == [5, 5, 10, 10, 15, 15]
    (path, first), (token_path, question), *_ = server.forms
    assert path == "/v1/oauth/device_authorization"
    assert (first["client_id"], first["device_name"], first["public_key"]) == ("mobizo-agent", "phone", SERVER_KEY)
    assert token_path == "/v1/oauth/token"
    assert question == {
        "grant_type": "urn:ietf:params:oauth:grant-type:device_code",
        "device_code": AUTHORIZATION["device_code"],
        "client_id": "mobizo-agent",
    }


def test_a_server_that_is_away_for_a_while_is_asked_ever_slower(server):
    """From five seconds on, if it names no interval."""
    del server.authorization["interval"]
    assert join(server, None, None, "authorization_pending", GRANTED)[1] == [5, 10, 20, 5]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("access_denied", Forbidden),
        ("expired_token", Unauthorized),
        ("invalid_grant", MobizoError),
        ({"access_token": "x"}, MobizoError),
    ],
)
def test_an_end_without_a_token(server, answer, error):
    with pytest.raises(error):
        join(server, "authorization_pending", answer)


def test_nobody_decides_in_time(server):
    with pytest.raises(Unauthorized, match="enroll"):
        join(server, "authorization_pending", expires_in=21)
    assert len(server.forms) == 1 + 4


def enroll(server, home, *more):
    arguments, pipe = ("enroll", "--server", server.url, "--name", "phone", *more), subprocess.PIPE
    return start_agent(AgentHome(home), *arguments, stdout=pipe, stderr=pipe, text=True)


def test_enroll_without_a_token_shows_a_code_and_joins(server, tmp_path):
    server.authorization["interval"], server.answers = 1, ["authorization_pending", GRANTED]
    process = enroll(server, tmp_path / "home")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    home = AgentHome(tmp_path / "home")
    own = public_text(home.stored_device_key().public_key())
    assert server.forms[0][1]["public_key"] == own
    for words in ("WDJB-MJHT", f"mobizo device approve WDJB-MJHT --server {server.url}", fingerprint(own)):
        assert words in output
    assert (home.config().token, home.config().public_key) == ("the-token", SERVER_KEY)


def test_interrupted_it_leaves_nothing(server, tmp_path):
    server.authorization["interval"], server.answers = 1, ["authorization_pending"]
    process = enroll(server, tmp_path / "home")
    assert server.waiting.wait(60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "Traceback" not in errors
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_refused_it_leaves_what_was_there(server, tmp_path):
    server.authorization["interval"], server.answers = 1, ["access_denied"]
    home = AgentHome(tmp_path / "home")
    home.create()
    key = home.device_key()
    process = enroll(server, home.path, "--json")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "refused" in errors
    assert json.loads(output)["user_code"] == "WDJB-MJHT"
    assert public_text(home.stored_device_key().public_key()) == public_text(key.public_key())
    assert not (home.path / "config.json").exists()
