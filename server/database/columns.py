"""Column types: identifiers, aware UTC times, and pydantic models as JSON text; and the only reader of the clock."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy import DateTime, Dialect, Enum, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

Model = TypeVar("Model", bound=BaseModel)

MAX_INTEGER = 2**31 - 1  # largest value of an integer column on every database
NAMES = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Table(DeclarativeBase):
    """Base class of every table."""

    metadata = MetaData(naming_convention=NAMES)


class Numbered:
    """A table whose rows are numbered in the order of their creation."""

    number: Mapped[int] = mapped_column(primary_key=True)


class UtcTime(TypeDecorator[datetime]):
    """An aware time, stored as UTC, also on databases without time zones (SQLite)."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Returns naive UTC for the driver."""
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Returns aware UTC."""
        return None if value is None else value.replace(tzinfo=UTC)


class Document(TypeDecorator[Model], Generic[Model]):
    """A pydantic model, stored as JSON text."""

    impl = Text
    cache_ok = True

    def __init__(self, model: type[Model]) -> None:
        super().__init__()
        self.model = model

    def process_bind_param(self, value: Model | None, dialect: Dialect) -> str | None:
        """Returns the model as JSON text."""
        return None if value is None else value.model_dump_json()

    def process_result_value(self, value: Any | None, dialect: Dialect) -> Model | None:
        """Returns the model parsed from JSON text."""
        return None if value is None else self.model.model_validate_json(value)


def text_enum(kind: type[StrEnum]) -> Enum:
    """Returns the type of a column that stores a string enumeration as plain text."""
    return Enum(kind, native_enum=False, length=16, values_callable=lambda members: [str(member) for member in members])


def view_of(kind: type[Model], row: object, **others: Any) -> Model:
    """Returns a row as the API shows it: `others`, and of all other fields the row's attributes of the same names."""
    return kind(**{name: getattr(row, name) for name in kind.model_fields if name not in others}, **others)


def new_id(kind: str) -> str:
    """Returns `kind` and 96 random bits, such as `job_1f3a...`, safe in URLs and paths."""
    return f"{kind}_{secrets.token_hex(12)}"


def utc_now() -> datetime:
    """Returns the current time, aware and in UTC."""
    return datetime.now(UTC)
