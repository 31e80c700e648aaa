"""Says what pydantic finds wrong in a document, in words for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_PREFIX = "Value error, "  # pydantic puts it before the messages of our own validators


class ValidationProblem(Protocol):
    """A `ValidationError` of pydantic or a `RequestValidationError` of FastAPI."""

    def errors(self) -> Sequence[Any]:
        """Returns a mapping of `loc`, `msg` and more for each problem."""


@dataclass(frozen=True)
class InvalidField:
    """A field that is not as described. location: the keys and indices that lead to it; empty: the whole document."""

    location: tuple[str | int, ...]
    message: str

    @property
    def path(self) -> str:
        """The location as `field.path`."""
        return ".".join(map(str, self.location))

    def __str__(self) -> str:
        """Returns `field.path: message`."""
        return f"{self.path}: {self.message}" if self.location else self.message


def invalid_fields(error: ValidationProblem) -> list[InvalidField]:
    """Returns the problems of a validation error in their order, each once."""
    items = (InvalidField(tuple(item["loc"]), item["msg"].removeprefix(_PREFIX)) for item in error.errors())
    return list(dict.fromkeys(items))


def first_invalid(error: ValidationProblem) -> InvalidField:
    """Returns the first problem of a validation error."""
    return invalid_fields(error)[0]
