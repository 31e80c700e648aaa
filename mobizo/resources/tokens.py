"""`client.tokens`: API tokens of people and services."""

from __future__ import annotations

from collections.abc import Iterator

from mobizo.connection import Resource
from shared.access import TokenGrant, TokenRequest, TokenView, WhoAmI


class Tokens(Resource):
    """Tokens of the tenant. All methods except `whoami` require an operator's token and raise Forbidden without it."""

    def whoami(self) -> WhoAmI:
        """Returns the tenant, role and scopes of this client's own token."""
        return self._connection.get(WhoAmI, "/v1/whoami")

    def list(self) -> Iterator[TokenView]:
        """Yields the tenant's tokens, newest first, without their secret text."""
        return self._connection.pages(TokenView, "/v1/tokens")

    def create(self, request: TokenRequest) -> TokenGrant:
        """Creates a token with at most this client's scopes. The returned secret text cannot be read again.

        Raises Forbidden if the request asks for more scopes than the client's own token has.
        """
        return self._connection.create(TokenGrant, "/v1/tokens", request.model_dump(mode="json"))

    def revoke(self, token_id: str) -> None:
        """Revokes a token with immediate effect. Raises NotFound."""
        self._connection.transport.request("DELETE", f"/v1/tokens/{token_id}", retry=False)
