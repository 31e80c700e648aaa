"""Every text, list and mapping that a request may bring has a bound, found in the API's own description."""

import re

import pytest

from server.app import create_api

UNBOUNDED = re.compile(r"(?<!\\)[*+]|,\}")  # of a pattern


def unbounded(schema, document, path, seen):
    """Paths of the parts of a schema that may be of any length."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(document["components"]["schemas"][name], document, name, seen | {name})
        return
    for choice in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(choice, ()):
            yield from unbounded(part, document, path, seen)
    kind = schema.get("type")
    if kind == "string" and not {"enum", "const", "maxLength"} & set(schema):
        bounded = "pattern" in schema and not UNBOUNDED.search(schema["pattern"])
        bounded |= schema.get("contentEncoding") == "base64"  # each such field bounds its bytes
        if not bounded and schema.get("format") not in ("date-time", "time", "binary"):
            yield path
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{path}[]"
        parts = [schema["items"]] if schema.get("items") else []
        for part in parts:
            yield from unbounded(part, document, f"{path}[]", seen)
    if kind == "object":
        for name, part in schema.get("properties", {}).items():
            yield from unbounded(part, document, f"{path}.{name}", seen)
        more = schema.get("additionalProperties", "properties" not in schema)
        if more:
            if "maxProperties" not in schema:
                yield f"{path}{{}}"
            if isinstance(more, dict):
                yield from unbounded(more, document, f"{path}{{}}", seen)


@pytest.fixture(scope="module")
def document():
    return create_api().openapi()


def test_every_text_list_and_mapping_of_a_body_is_bounded(document):
    unbounded_names = set()
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            for kind, media in content.items():
                if kind == "application/json":
                    unbounded_names |= set(unbounded(media["schema"], document, operation["operationId"], frozenset()))
    assert unbounded_names == set()


def test_every_text_of_an_address_is_bounded(document):
    unbounded_names = set()
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query":
                    location = f"{operation['operationId']}?{parameter['name']}"
                    unbounded_names |= set(unbounded(parameter["schema"], document, location, frozenset()))
    assert unbounded_names == set()
