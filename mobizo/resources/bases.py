"""`client.bases`: the base models that jobs may use."""

from __future__ import annotations

from mobizo.connection import Connection
from shared.catalog import BaseView


class Bases:
    """Base models that the operator registered; they are the same for every tenant."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> list[BaseView]:
        """Returns all base models, by name."""
        return [BaseView.model_validate(item) for item in self._connection.get("/v1/bases")]
