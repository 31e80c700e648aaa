"""`client.tokens`: API tokens of people and services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import quote

from mobizo.connection import Connection
from shared.access import LoginApproval, LoginRequestView, Scope, TokenGrant, TokenRequest, TokenView, WhoAmI


class Tokens:
    """Tokens of the tenant. All methods except `whoami` require an operator's token and raise Forbidden without it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def whoami(self) -> WhoAmI:
        """Returns the tenant, role and scopes of this client's own token."""
        return WhoAmI.model_validate(self._connection.get("/v1/whoami"))

    def list(self) -> Iterator[TokenView]:
        """Yields the tenant's tokens, newest first, without their secret text."""
        for item in self._connection.pages("/v1/tokens"):
            yield TokenView.model_validate(item)

    def create(self, request: TokenRequest) -> TokenGrant:
        """Creates a token with at most this client's scopes. The returned secret text cannot be read again.

        Raises Forbidden if the request asks for more scopes than the client's own token has.
        """
        return TokenGrant.model_validate(self._connection.create("/v1/tokens", request.model_dump(mode="json")))

    def rotate(self, token_id: str) -> TokenGrant:
        """Replaces a token by one with the same permissions and another text, which cannot be read again.

        Raises NotFound, or Conflict if the token has expired or was revoked.
        """
        return TokenGrant.model_validate(self._connection.create(f"/v1/tokens/{token_id}/rotate"))

    def revoke(self, token_id: str) -> None:
        """Revokes a token with immediate effect. Raises NotFound."""
        self._connection.transport.request("DELETE", f"/v1/tokens/{token_id}", retry=False)

    def get_login(self, user_code: str) -> LoginRequestView:
        """Returns the login that waits with this code, and the scopes that `approve_login` grants. Raises NotFound."""
        return LoginRequestView.model_validate(self._connection.get(_login_path(user_code)))

    def approve_login(self, user_code: str, scopes: Iterable[Scope] | None = None) -> LoginRequestView:
        """Grants a login a token with at most this client's scopes. Raises NotFound, Forbidden or Conflict.

        scopes: None: those that the program asks for and this client has.
        """
        body = LoginApproval(scopes=None if scopes is None else list(scopes)).model_dump(mode="json")
        response = self._connection.send("POST", f"{_login_path(user_code)}/approve", body)
        return LoginRequestView.model_validate(response)

    def deny_login(self, user_code: str) -> LoginRequestView:
        """Refuses a login. Raises NotFound, or Conflict if it was confirmed before."""
        return LoginRequestView.model_validate(self._connection.send("POST", f"{_login_path(user_code)}/deny"))


def _login_path(user_code: str) -> str:
    return f"/v1/login-requests/{quote(user_code, safe='')}"
