"""Bodies of hostile size and form: the token is checked first, every route has a limit, and reading one is cheap."""

import json
import time

import httpx
import pytest

import server.web.middleware
import server.web.routes
from server.app import create_api, create_app
from server.web.bodies import MAX_DEPTH, MAX_NAMES, MAX_VALUES, parse_json
from server.web.routes import UNCHECKED_BODY_BYTES, Route
from shared.errors import BadRequest
from tests.server.actors import job_request, serving
from tests.server.web.test_bodies import JSON, Link

DATABASES = ("sqlite",)
LIMIT = 2000  # bytes, for this test's JSON bodies and uploads
BAD_TOKENS = (None, "x", "mobizo-app-" + "x" * 43)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b"[" + b"0," * MAX_VALUES + b"0]",
        b"[" + b"[]," * MAX_VALUES + b"0]",
        json.dumps({str(number): 0 for number in range(MAX_NAMES + 1)}).encode(),
        json.dumps([{"a": 1}] * (MAX_NAMES + 1)).encode(),
        b"[" + b"9" * 5000 + b"]",
        b'{"a":' + b'"\\"' * 1_000_000,
        b"{" + b'"a":1,' * (MAX_NAMES - 1) + b'"a":1}',
    ],
)
def test_reading_hostile_json_takes_a_second_at_most(text):
    began = time.process_time()
    with pytest.raises(BadRequest):
        parse_json(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "value",
    [
        "[{,:" * 500_000,
        ['"\\[' * 200_000] * 2,
        list(range(MAX_VALUES - 2)),
        {str(number): number for number in range(MAX_NAMES - 1)},
        json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH),
    ],
)
def test_large_json_within_the_bounds_is_read(value):
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_no_body_is_read_before_the_token_is_checked(fleet, problem, monkeypatch, token):
    bodies = []
    monkeypatch.setattr(server.web.routes, "parse_json", bodies.append)
    for method, path in (("POST", "/v1/jobs"), ("PUT", "/v1/approval-rule"), ("POST", "/v1/score")):
        answer = fleet.actor(token).request(method, path, json={"a": 1})
        problem(answer, 401, "unauthorized")
    assert bodies == []


def operations():
    """(method, path) of each operation of the API's description."""
    document = create_api().openapi()
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


def test_every_operation_refuses_a_body_one_byte_over_its_limit(home, problem, monkeypatch):
    monkeypatch.setattr(server.web.routes, "MAX_BODY_BYTES", LIMIT)
    settings = home.settings.model_copy(update={"upload_bytes": LIMIT})
    app = create_app(settings)
    limits = {
        (method, route.path.replace(":path}", "}")): route.body_limit(settings)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods
    }
    operator = httpx.Client(headers={"Authorization": f"Bearer {home.token('operator')}"})
    device = httpx.Client(headers={"Authorization": f"Bearer {home.token('device')}"})
    operation_keys = set()
    with serving(app) as url, operator, device:
        for method, path in operations():
            limit = limits[method, path]
            assert 0 < limit <= max(LIMIT, UNCHECKED_BODY_BYTES), path
            address = url + path.replace("{", "").replace("}", "")
            answers = [client.request(method, address, content=b" " * (limit + 1)) for client in (operator, device)]
            admitted_answers = [answer for answer in answers if answer.status_code not in (401, 403)]
            for answer in admitted_answers:
                if "error" in answer.json():  # in OpenAI's form
                    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too-large")
                else:
                    problem(answer, 413, "too-large")
                operation_keys.add((method, path))
    assert operation_keys == set(operations())


@pytest.mark.parametrize("operation", [("PUT", "/v1/approval-rule"), ("POST", "/v1/jobs")])
def test_a_body_without_a_length_is_cut_off_at_the_limit(home, operation, monkeypatch):
    monkeypatch.setattr(server.web.routes, "MAX_BODY_BYTES", LIMIT)
    with serving(create_app(home.settings)) as url, Link(url, home.token("operator")) as link:
        link.head(*operation, JSON, "Transfer-Encoding: chunked")
        link.send(f"{LIMIT + 1:x}\r\n".encode() + b" " * (LIMIT + 1) + b"\r\n")
        link.assert_problem(413, "too-large")


def test_at_most_twenty_validation_errors_are_reported(app, problem):
    many = {f"{number}": number for number in range(5_000)} | {"x" * 10_000: 1}
    document = problem(app.post("/v1/jobs", json=many), 422, "invalid-request")
    assert len(document["errors"]) == 20
    assert "more)" in document["detail"]
    assert len(json.dumps(document)) < 10_000


def test_a_wrong_recipe_is_one_error_in_our_own_words(app, problem):
    body = job_request(recipe={"estimator": "gradient", "backend": "qnn"})
    document = problem(app.post("/v1/jobs", json=body), 422, "invalid-request")
    assert document["errors"] == [{"field": "recipe", "message": document["detail"].removeprefix("recipe: ")}]
    assert document["detail"].startswith("recipe: backend qnn has no reverse pass")
