"""`client.programs`: signed manifests of compiled programs."""

from __future__ import annotations

from mobizo.connection import Connection
from shared.program import SignedManifest


class Programs:
    """Compiled programs, one per recipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, recipe_id: str) -> SignedManifest:
        """Returns the signed manifest of a recipe's program. Raises NotFound if it has not been compiled.

        recipe_id: sha256 of the recipe, as `JobView.recipe_id`.
        """
        return SignedManifest.model_validate(self._connection.get(f"/v1/programs/{recipe_id}"))
