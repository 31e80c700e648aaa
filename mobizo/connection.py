"""What every part of the client shares: one server, one token, pages, things made once. Knows no noun."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from mobizo.pins import Pins
from shared.protocol import Page, ServerInfo
from shared.succession import ServerKeys
from shared.transport import Transport


class Connection:
    """One server, seen by one token."""

    def __init__(self, server: str, token: str, *, pins: Pins | None = None) -> None:
        """server: base URL, such as http://127.0.0.1:8000. token: an app's or operator's token.

        pins: keys that the server may sign with; by default the one that it shows first, for this object's life.
        """
        self._transport = Transport(server, token)
        self._pins = pins or Pins()
        self.address = server.rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    def server(self) -> ServerInfo:
        """Version and public key of the server."""
        return ServerInfo.model_validate(self._get("/v1/server"))

    def keys(self) -> ServerKeys:
        """The key that the server signs with now, and the statements of the keys before it that lead there."""
        return ServerKeys.model_validate(self._get("/v1/server/keys"))

    def usage(self) -> dict[str, Any]:
        """What the server has used so far (operator): `peak_rss_bytes`."""
        usage: dict[str, Any] = self._get("/v1/server/usage")
        return usage

    def _get(self, path: str, **params: Any) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        return self._transport.request("GET", path, params=given or None).json()

    def _make(self, path: str, body: Any = None) -> Any:
        """A POST that is tried again where no answer came: the server does once what comes with one key."""
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return self._transport.request("POST", path, json=body, headers=headers).json()

    def _pages(self, path: str, **params: Any) -> Iterator[Any]:
        cursor: str | None = None
        while True:
            page = Page[Any].model_validate(self._get(path, **params, cursor=cursor))
            yield from page.items
            if page.next is None:
                return
            cursor = page.next
