"""The connection that all resources of a client share: JSON requests, paginated lists, idempotent creation."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import TypeAdapter

from mobizo.pinned_keys import PinnedKeys
from shared.key_rotation import ServerKeys
from shared.protocol import Page
from shared.transport import Transport

Kind = TypeVar("Kind")


class Connection:
    """HTTP connection to one server with one token, and the signing keys that the client trusts."""

    def __init__(self, base_url: str, token: str, pinned_keys: PinnedKeys) -> None:
        """base_url: address of the server. Raises Unreachable if `base_url` is not a URL."""
        self.transport = Transport(base_url, token)
        self.base_url = base_url.rstrip("/")
        self._pinned_keys = pinned_keys

    def close(self) -> None:
        """Closes the connection."""
        self.transport.close()

    def get(self, kind: type[Kind], path: str, **params: Any) -> Kind:
        """Returns the JSON body of a GET as an object of `kind`. Query parameters that are None are left out."""
        return self.send(kind, "GET", path, **params)

    def send(self, kind: type[Kind], method: str, path: str, body: Any = None, **params: Any) -> Kind:
        """Sends `body` as JSON and returns the JSON body of the response as `get` does.

        The request is retried if the connection fails, so sending it twice must have the effect of sending it once.
        """
        query = {name: value for name, value in params.items() if value is not None}
        return self._request(kind, method, path, json=body, params=query or None)

    def create(self, kind: type[Kind], path: str, body: Any = None) -> Kind:
        """POSTs `body` with an idempotency key, so that a retry creates nothing twice; returns the response."""
        return self._request(kind, "POST", path, json=body, headers={"Idempotency-Key": str(uuid.uuid4())})

    def pages(self, kind: type[Kind], path: str, **params: Any) -> Iterator[Kind]:
        """Yields the items of a paginated list; fetches the next page when it is needed."""
        cursor: str | None = None
        while True:
            page = self.get(Page[Any], path, **params, cursor=cursor)
            yield from map(TypeAdapter(kind).validate_python, page.items)
            if page.next is None:
                return
            cursor = page.next

    def server_keys(self) -> ServerKeys:
        """Returns the server's current signing key and the signed statements by which older keys name it."""
        return self.get(ServerKeys, "/v1/server/keys")

    def trusted_key(self, key_id: str) -> Ed25519PublicKey:
        """Returns the trusted key with this id. Raises Untrusted if the client does not trust such a key."""
        return self._pinned_keys.key(self.base_url, key_id, self.server_keys)

    def _request(self, kind: type[Kind], method: str, path: str, **options: Any) -> Kind:
        return TypeAdapter(kind).validate_python(self.transport.request(method, path, **options).json())


class Resource:
    """One part of the API, over the connection of a client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
