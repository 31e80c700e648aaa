"""`client.programs`: signed manifests of compiled programs."""

from __future__ import annotations

from mobizo.connection import Resource
from shared.program import SignedManifest


class Programs(Resource):
    """Compiled programs, one per recipe."""

    def get(self, recipe_id: str) -> SignedManifest:
        """Returns the signed manifest of a recipe's program. Raises NotFound if it has not been compiled.

        recipe_id: sha256 of the recipe, as `JobView.recipe_id`.
        """
        return self._connection.get(SignedManifest, f"/v1/programs/{recipe_id}")
