"""Bodies that cost as much as a request can, made from the API's own description."""

import json

from server.web.bodies import MAX_DEPTH, MAX_NAMES, MAX_VALUES

SPARE = 1000  # of a limit, for what is around the hostile part
WORDS = ("title", "description", "default", "examples")  # of a schema, that validation does not read


class Bodies:
    """Hostile JSON for the schemas of one description. limit: bytes of a body."""

    def __init__(self, document, limit):
        self._schemas, self._limit = document["components"]["schemas"], limit
        self._kinds = set()

    def any(self):
        """(name, bytes) of each body that costs the same whatever a route's schema."""
        yield "deepest", b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
        yield "too deep", b"[" * self._limit
        yield "unknown names", _dump(self._mapping(0))
        yield "values", _dump([0] * self._most(2))
        yield "escapes", b'"' + b"\\u0041" * ((self._limit - 2) // 6) + b'"'
        yield "digits", b"[" + b",".join([b"9" * 4000] * ((self._limit - 2) // 4001)) + b"]"

    def of(self, schema):
        """(name, bytes) of each body for a schema. A part that an earlier schema has too is only in "all large"."""
        properties = self._resolved(schema).get("properties", {})
        for name, part in properties.items():
            kind = json.dumps({key: value for key, value in self._resolved(part).items() if key not in WORDS})
            if kind in self._kinds:
                continue
            self._kinds.add(kind)
            yield f"{name}: empty lists", _dump({name: [[]] * self._most(3)})
            yield f"{name}: empty objects", _dump({name: [{}] * self._most(3)})
            yield f"{name}: a mapping", _dump({name: self._mapping([])})
            yield f"{name}: a text", _dump({name: "x" * (self._limit - SPARE)})
            yield f"{name}: large", self._fitting({name: part}, wrong=False)
        yield "all large", self._fitting(properties, wrong=False)
        yield "all large and wrong", self._fitting(properties, wrong=True)

    def _mapping(self, value):
        return {f"n{number}": value for number in range(min(MAX_NAMES - SPARE, (self._limit - SPARE) // 12))}

    def _most(self, size):
        return min(MAX_VALUES - SPARE, (self._limit - SPARE) // size)

    def _fitting(self, properties, wrong):
        """The largest values of these properties that a body may have."""
        budget = self._limit
        while True:
            remaining = [budget]
            body = _dump({name: self._large(part, remaining, wrong, 0) for name, part in properties.items()})
            if len(body) <= self._limit:
                return body
            budget = budget * 4 // 5

    def _resolved(self, schema):
        while True:
            if "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
                continue
            choices = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
            choices = [part for part in choices if part.get("type") != "null"]
            if not choices:
                return schema
            # The choice with the most inside.
            schema = max(choices, key=lambda part: ("$ref" in part) + 2 * (part.get("type") in ("array", "object")))

    def _large(self, schema, remaining, wrong, depth):
        """A value as large as the schema and the rest of the budget (bytes) allow; wrong: its leaves have no type."""
        schema = self._resolved(schema)
        remaining[0] -= 4
        if "enum" in schema or "const" in schema:
            return [] if wrong else schema.get("const", schema.get("enum", [None])[0])
        kind = schema.get("type")
        if kind == "array" and depth < 8:
            body = []
            for _ in range(min(schema.get("maxItems", 10_000), 20_000)):
                if remaining[0] <= 0:
                    break
                body.append(self._large(schema.get("items", {}), remaining, wrong, depth + 1))
            return body
        if kind == "object" and depth < 8:
            body = {
                name: self._large(part, remaining, wrong, depth + 1)
                for name, part in schema.get("properties", {}).items()
            }
            more = schema.get("additionalProperties")
            for number in range(min(schema.get("maxProperties", 0), 10_000) if isinstance(more, dict) else 0):
                if remaining[0] <= 0:
                    break
                body[f"n{number}"] = self._large(more, remaining, wrong, depth + 1)
            remaining[0] -= 8 * len(body)
            return body
        if wrong:
            return []
        if kind in ("integer", "number"):
            return schema.get("maximum", 1)
        if kind == "boolean":
            return True
        text = "x" * max(0, min(schema.get("maxLength", 100), remaining[0]))
        remaining[0] -= len(text)
        return text


def _dump(value):
    return json.dumps(value, separators=(",", ":")).encode()
