"""`client.bases`: the base models that jobs may use."""

from __future__ import annotations

from mobizo.connection import Resource
from shared.catalog import BaseView


class Bases(Resource):
    """Base models that the operator registered; they are the same for every tenant."""

    def list(self) -> list[BaseView]:
        """Returns all base models, by name."""
        return self._connection.get(list[BaseView], "/v1/bases")
