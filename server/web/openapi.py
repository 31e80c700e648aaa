"""The API's OpenAPI description: problems, tags, ranges and operation names, beyond what FastAPI generates.

A route declares its own errors by `responses=raises(...)`, a dependency by `@may_raise(...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from server.web.request_examples import REQUEST_EXAMPLES
from shared.errors import PROBLEM_TYPE, MobizoError

PROBLEM_JSON = "application/problem+json"
BINARY = "application/octet-stream"
TAGGED_METHODS = ("GET", "PATCH")  # whose JSON answers carry an ETag
TAGGED_PATHS = "/v1/"  # health checks have none
Call = TypeVar("Call")
Responses = dict[int | str, dict[str, Any]]
_RAISED = "x-raised"
_MARK = "may_raise"


def _text(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


_TAG = _text("strong entity tag")
_RETRY = _text("seconds to wait")
_HEADERS = {
    "401": {"WWW-Authenticate": _text("Bearer")},
    "416": {"Content-Range": _text("bytes */ and the file's size")},
    "429": {"Retry-After": _RETRY, "RateLimit": _text("the limit that was met")},
    "503": {"Retry-After": _RETRY},
}
BYTES_CONTENT = {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}
_PROBLEM = {
    "type": "object",
    "title": "Problem",
    "description": "A problem document (RFC 9457). `code` is stable; docs/problems.md lists all.",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string", "description": f"{PROBLEM_TYPE}CODE"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what happened and what to do, for people"},
        "code": {"type": "string", "description": "what programs go by"},
        "instance": {"type": "string", "description": "path of the request"},
        "errors": {
            "type": "array",
            "description": "of invalid-request: the fields at fault",
            "items": {
                "type": "object",
                "required": ["field", "message"],
                "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}


def raises(*errors: type[MobizoError]) -> Responses:
    """Returns `responses=` of a route that may raise these errors."""
    responses: Responses = {}
    for error in errors:
        responses.setdefault(error.status, {_RAISED: []})[_RAISED].append(error)
    return responses


def may_raise(*errors: type[MobizoError]) -> Callable[[Call], Call]:
    """Marks a dependency: routes that use it may answer with these errors."""

    def mark(call: Call) -> Call:
        setattr(call, _MARK, errors)
        return call

    return mark


def raised_by(call: object) -> tuple[type[MobizoError], ...]:
    """Returns the errors that a dependency was marked with."""
    errors: tuple[type[MobizoError], ...] = getattr(call, _MARK, ())
    return errors


def _problem(errors: Iterable[type[MobizoError]]) -> dict[str, Any]:
    by_code = {error.code: error for error in errors}
    lines = [f"`{code}`: {(by_code[code].__doc__ or '').splitlines()[0]}" for code in sorted(by_code)]
    schema = {"$ref": "#/components/schemas/Problem", "properties": {"code": {"enum": sorted(by_code)}}}
    return {"description": "\n\n".join(lines), "content": {PROBLEM_JSON: {"schema": schema}}}


def documented(responses: Mapping[int | str, dict[str, Any]], errors: Iterable[type[MobizoError]]) -> Responses:
    """Returns `responses` with the problems of `raises` and of `errors`, all in OpenAPI's form."""
    by_status: dict[int, list[type[MobizoError]]] = {}
    for error in errors:
        by_status.setdefault(error.status, []).append(error)
    described: Responses = {}
    for status, response in responses.items():
        if _RAISED in response:
            by_status.setdefault(int(status), []).extend(response[_RAISED])
        else:
            described[status] = response
    for status, raised in by_status.items():
        # A route may describe the same status itself, too.
        content = described.get(status, {}).get("content", {})
        problem = _problem(raised)
        described[status] = problem | {"content": content | problem["content"]}
    return described


def _header(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string"},
    }


_IF_NONE_MATCH = _header("If-None-Match", "entity tags that the client has: if one is still right, 304")
FILE_PARAMETERS = {
    "parameters": [
        _IF_NONE_MATCH,
        _header("Range", "one range of bytes, such as bytes=100-"),
        _header("If-Range", "the ETag of the file that the range continues; another file is sent whole"),
    ]
}
_FILE_HEADERS = {"ETag": _TAG, "Accept-Ranges": {"schema": {"const": "bytes"}}}
_PART_HEADERS = {**_FILE_HEADERS, "Content-Range": {"schema": {"type": "string"}}}
FILE: Responses = {
    200: {"description": "the whole file", "headers": _FILE_HEADERS, **BYTES_CONTENT},
    206: {"description": "the range", "headers": _PART_HEADERS, **BYTES_CONTENT},
    304: {"description": "the client has it", "headers": {"ETag": _TAG}},
    307: {
        "description": "the file is at the Location for some minutes: fetch it there, without the token",
        "headers": {"Location": {"schema": {"type": "string", "format": "uri"}}},
    },
}


def operation_id(route: APIRoute) -> str:
    """Returns the name of a route's function, such as `create_job`; generated clients have functions of these names."""
    return route.name


def describe(app: FastAPI) -> dict[str, Any]:
    """Returns the API's OpenAPI document, which is generated once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
        separate_input_output_schemas=False,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = _PROBLEM
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _add_headers(operation)
            _add_example(operation)
            if path.startswith(TAGGED_PATHS) and method.upper() in TAGGED_METHODS:
                _add_tags(method, operation)
    app.openapi_schema = document
    return document


def _add_headers(operation: dict[str, Any]) -> None:
    """Adds the headers of responses."""
    keyed = any(item["name"] == "Idempotency-Key" for item in operation.get("parameters", []))
    for status, response in operation["responses"].items():
        headers = dict(_HEADERS.get(status, {}))
        if keyed and status.startswith("2"):
            headers["Idempotency-Replayed"] = _text("true: this is the answer that its key got before")
        if headers:
            response["headers"] = response.get("headers", {}) | headers


def _add_example(operation: dict[str, Any]) -> None:
    """Adds the example of a JSON body."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        # A body that may be left out is that of a model, or null.
        schema = body["schema"].get("anyOf", [body["schema"]])[0]
        body["example"] = REQUEST_EXAMPLES[schema["$ref"].rpartition("/")[2]]


def _add_tags(method: str, operation: dict[str, Any]) -> None:
    """Adds the ETag of JSON responses."""
    ok = operation["responses"].get(str(HTTPStatus.OK), {})
    if "application/json" not in ok.get("content", {}):
        return
    ok.setdefault("headers", {})["ETag"] = _TAG
    if method == "get":
        operation.setdefault("parameters", []).append(_IF_NONE_MATCH)
        operation["responses"]["304"] = {"description": "the client has it", "headers": {"ETag": _TAG}}


def methods_at(document: dict[str, Any], path: str) -> list[str]:
    """Returns the methods of an address, including HEAD for files."""
    methods: set[str] = set()
    for template, operations in document["paths"].items():
        if re.fullmatch(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(template)), path):
            methods |= {method.upper() for method in operations}
            methods |= {"HEAD"} if "206" in operations.get("get", {}).get("responses", {}) else set()
    return sorted(methods)
