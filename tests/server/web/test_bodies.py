"""Requests as no client library makes them: each gets one clear answer, and the server goes on."""

import contextlib
import json
import socket

import pytest

from server.app import create_app
from server.web.bodies import parse_json
from shared.errors import BadRequest
from tests.server.actors import address_of, job_request, serving

DATABASES = ("postgresql",)  # the stricter: it takes no NUL and nothing that is not UTF-8
JOB = json.dumps(job_request())


class Link:
    """One connection, byte by byte."""

    def __init__(self, url, token=None):
        self._socket = socket.create_connection(address_of(url), timeout=30)
        self._token = token

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._socket.close()

    def send(self, data):
        self._socket.sendall(data)

    def head(self, method, target, *lines):
        """A request's head."""
        token = [f"Authorization: Bearer {self._token}"] if self._token else []
        text = [f"{method} {target} HTTP/1.1", "Host: x", *token, *lines, "", ""]
        self.send("\r\n".join(text).encode("latin-1"))

    def answer(self):
        """(status, headers, body) of the next answer."""
        with self._socket.makefile("rb") as file:
            status = int(file.readline().split()[1])
            headers = {}
            while (line := file.readline().decode().strip()) != "":
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            return status, headers, file.read(int(headers.get("content-length", 0)))

    def assert_closed(self):
        """The server answers nothing more."""
        with contextlib.suppress(ConnectionResetError):
            assert self._socket.recv(1) == b""

    def assert_problem(self, status, code):
        """The answer is this problem."""
        answer_status, headers, body = self.answer()
        assert (answer_status, headers["content-type"]) == (status, "application/problem+json")
        assert json.loads(body)["code"] == code
        assert headers["x-request-id"]
        return headers


@pytest.fixture
def link(fleet, app):
    with Link(fleet.url, app.token) as connected:
        yield connected


JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "application/json; charset=latin-1",
        "application/json; charset=utf-16",
        "json",
        "/",
        "",
    ],
)
def test_json_that_says_it_is_something_else(app, problem, kind):
    problem(app.post("/v1/jobs", content=JOB, headers={"Content-Type": kind}), 415, "unsupported-media-type")
    assert app.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", "application/problem+json", "application/json;x=1"]
)
def test_json_that_says_so(app, kind):
    assert app.post("/v1/jobs", content=JOB, headers={"Content-Type": kind}).status_code == 202


def test_json_without_a_type_and_compressed(app, problem):
    problem(app.post("/v1/jobs", content=JOB), 415, "unsupported-media-type")
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    problem(app.post("/v1/jobs", content=JOB, headers=headers), 415, "unsupported-media-type")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": NaN}',
        b"[-Infinity]",
        b"[1e999]",
        b'["\\u0000"]',
        b'{"\\u0000": 1}',
        b'["\\ud800"]',
        b'["\\uDC00\\uD800"]',
        b'["\xff"]',
        b'["\xed\xa0\x80"]',
        b"\xef\xbb\xbf{}",
        b'{"a": 1}\x00',
        '["é"]'.encode("utf-16"),
        b"{'a': 1}",
        b"[1,]",
        b"// x\n1",
        b" ",
    ],
)
def test_json_that_readers_could_understand_differently(text):
    with pytest.raises(BadRequest) as error_info:
        parse_json(text)
    assert error_info.value.detail.startswith("the body ")


@pytest.mark.parametrize("value", [None, 1, -(2**63), 0.1, "é\U0001f600\\u0000 \n", [[[]]], {"": {"a": [True]}}])
def test_json_that_all_understand_alike(value):
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_a_body_that_is_shorter_than_it_said(fleet, app):
    with Link(fleet.url, app.token) as link:
        link.head("POST", "/v1/jobs", JSON, "Content-Length: 1000")
        link.send(b"{")
    assert app.get("/v1/jobs").json()["items"] == []


def test_two_ways_to_tell_the_length_are_one_too_many(link, app):
    """What a proxy and a server read differently is how requests are smuggled: never two requests of one."""
    link.head("POST", "/v1/jobs", JSON, "Content-Length: 5", "Transfer-Encoding: chunked")
    link.send(b"0\r\n\r\nGET /v1/jobs HTTP/1.1\r\nHost: x\r\n\r\n")
    status, headers, _ = link.answer()
    assert (status, headers["connection"]) == (400, "close")
    link.assert_closed()
    assert app.get("/v1/jobs").json()["items"] == []


def test_a_body_that_never_comes(home, device, lease, monkeypatch):
    monkeypatch.setattr("server.web.middleware.BODY_SECONDS", 0.2)
    settings = home.settings.model_copy(update={"signed_requests": "none"})
    before = home.stored_files()
    with serving(create_app(settings)) as url:
        for method, target, token in (
            ("POST", "/v1/jobs", home.token("app")),
            ("PUT", f"/v1/leases/{lease['id']}/adapter", device.token),
        ):
            with Link(url, token) as link:
                link.head(method, target, *([JSON] if method == "POST" else []), "Content-Length: 100")
                link.send(b"{")
                link.assert_problem(408, "too-slow")
        with Link(url) as link:
            link.head("GET", "/healthz")
            assert link.answer()[0] == 200
    assert home.stored_files() == before


def test_who_asks_first_is_told_to_go_on(link):
    link.head("POST", "/v1/jobs", JSON, "Expect: 100-continue", f"Content-Length: {len(JOB)}")
    assert link.answer()[0] == 100
    link.send(JOB.encode())
    assert link.answer()[0] == 202


def test_a_stranger_who_asks_first_need_not_send_it(fleet):
    with Link(fleet.url) as link:
        link.head("POST", "/v1/jobs", JSON, "Expect: 100-continue", f"Content-Length: {len(JOB)}")
        link.assert_problem(401, "unauthorized")


TRICKS = [
    "..",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "%2Fetc%2Fpasswd",
    "..;",
    "....//",
    "%c0%ae%c0%ae",
    "%ff",
    "%ed%a0%80",
    "a%0d%0aX-Evil:%201",
    "%00",
    "a%00b",
    "%7f",
    "%F0%9F%98%80",
    "%u002e",
    "%25%32%65",
    "'%20OR%201=1--",
    "%24%7B7*7%7D",
    "~",
    "*",
    "x" * 5000,
]
PLACES = [
    "/v1/jobs/{}/events",
    "/v1/adapters/{}",
    "/v1/adapters/a/versions/1/peft/{}",
    "/v1/files/{}",
    "/v1/programs/{}",
    "/{}",
]


def test_addresses_with_tricks(fleet, app):
    with Link(fleet.url, app.token) as link:
        for place in PLACES:
            for trick in TRICKS:
                link.head("GET", place.format(trick))
                status, headers, body = link.answer()
                assert status in (400, 404, 422), (place, trick)
                assert headers["content-type"] == "application/problem+json", (place, trick)
                assert "x-evil" not in headers
                assert b"root:" not in body
                json.loads(body)


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PATCH", "DELETE", "BREW", "PROPFIND"])
def test_methods_that_an_address_does_not_take(link, method):
    link.head(method, "/v1/jobs")
    assert link.assert_problem(405, "method-not-allowed")["allow"] == "GET, POST"


def test_what_every_answer_carries(app):
    for response in (app.get("/v1/jobs"), app.get("/nothing"), app.post("/v1/jobs", json={}), app.get("/healthz")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-request-id"]
        assert response.headers["cache-control"]
