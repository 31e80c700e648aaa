"""Column types: aware UTC times, and pydantic models as JSON text."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy import DateTime, Dialect, Enum, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

Model = TypeVar("Model", bound=BaseModel)

MOST = 2**31 - 1  # that an integer column holds on every database
NAMES = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Table(DeclarativeBase):
    """Root of every table."""

    metadata = MetaData(naming_convention=NAMES)


class Numbered:
    """A table whose rows are numbered in the order they were made."""

    number: Mapped[int] = mapped_column(primary_key=True)


class Moment(TypeDecorator[datetime]):
    """An aware time, kept as UTC also where the database has no time zones (SQLite)."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Naive UTC for the driver."""
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Aware UTC for us."""
        return None if value is None else value.replace(tzinfo=UTC)


class Document(TypeDecorator[Model], Generic[Model]):
    """A pydantic model as JSON text."""

    impl = Text
    cache_ok = True

    def __init__(self, model: type[Model]) -> None:
        super().__init__()
        self.model = model

    def process_bind_param(self, value: Model | None, dialect: Dialect) -> str | None:
        """JSON text."""
        return None if value is None else value.model_dump_json()

    def process_result_value(self, value: Any | None, dialect: Dialect) -> Model | None:
        """The model again."""
        return None if value is None else self.model.model_validate_json(value)


def word(kind: type[StrEnum]) -> Enum:
    """A column that holds one of an enumeration's words, as plain text."""
    return Enum(kind, native_enum=False, length=16, values_callable=lambda members: [str(member) for member in members])
