"""The committed description of the API, and that it is the API's."""

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from server.app import create_api
from server.web.openapi import PROBLEM_JSON
from server.web.routes import BodyKind, Route
from shared.errors import MobizoError
from tests.docs.server_pages import DOCS, pages

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def document():
    return create_api().openapi()


@pytest.fixture(scope="module")
def operations(document):
    return {(method, path): op for path, item in document["paths"].items() for method, op in item.items()}


def test_the_committed_pages_are_current(monkeypatch):
    monkeypatch.setenv("MOBIZO_UPLOAD_BYTES", "5000000")  # the pages have defaults
    for path, text in pages(create_api()).items():
        assert path.read_text() == text, f"{path.name} is not current: python -m tests.docs.server_pages"
    assert "| `/v1/jobs POST` | `jobs:write` | token | JSON, 4 MiB |" in (DOCS / "routes.md").read_text()


def test_names_of_operations_are_readable_and_each_is_one(operations):
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name == name.lower() and len(name) < 40 for name in names)
    assert {"create_job", "list_jobs", "get_job", "cancel_job", "acquire_lease", "download_lora_b"} <= set(names)


def test_each_model_has_one_name(document):
    names = document["components"]["schemas"]
    assert not [name for name in names if "__" in name or name.endswith(("-Input", "-Output"))]


def test_every_json_body_has_an_example_that_is_accepted():
    api = create_api()
    bodies = [route for route in api.routes if isinstance(route, Route) and route.body_kind is BodyKind.JSON]
    assert len(bodies) > 20
    for route in bodies:
        (method,) = route.methods
        operation = api.openapi()["paths"][route.path_format][method.lower()]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        TypeAdapter(route.body_field.field_info.annotation).validate_json(json.dumps(example))


def error_codes(error):
    yield error.code
    for child in error.__subclasses__():
        yield from error_codes(child)


def test_every_operation_says_which_problems_it_may_answer(operations):
    codes = set(error_codes(MobizoError))
    for name, operation in operations.items():
        problems = {status: r for status, r in operation["responses"].items() if status >= "400"}
        assert {"400", "500", "503"} <= set(problems), name
        for status, response in problems.items():
            # OpenAI's API has a form of its own for errors, beside ours.
            own = {"application/json"} if operation["tags"] == ["openai"] else set()
            assert set(response["content"]) == {PROBLEM_JSON} | own, (name, status)
            listed_codes = response["content"][PROBLEM_JSON]["schema"]["properties"]["code"]["enum"]
            assert listed_codes, (name, status)
            assert set(listed_codes) <= codes, (name, status)
            assert response["description"], (name, status)


def test_what_needs_a_token_says_so(operations):
    for (method, path), operation in operations.items():
        public = path in ("/healthz", "/readyz", "/v1/server")
        if not public and "security" not in operation:
            # Routes that lend no trust to their caller say nothing of 401 either.
            assert "401" not in operation["responses"], path
        if public:
            assert "security" not in operation, path
        if "401" in operation["responses"]:
            assert operation["security"], (method, path)


def test_files_are_bytes_in_ranges(operations):
    files = [op for op in operations.values() if "206" in op["responses"]]
    assert len(files) >= 4
    for operation in files:
        assert {"Range", "If-Range", "If-None-Match"} <= {item["name"] for item in operation["parameters"]}
        for status in ("200", "206"):
            assert operation["responses"][status]["content"] == {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            }
            assert "ETag" in operation["responses"][status]["headers"]
        assert "416" in operation["responses"]
