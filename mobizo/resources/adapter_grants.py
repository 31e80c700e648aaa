"""`client.adapter_grants`: grants that let a device download an adapter which it did not train."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from mobizo.adapter_paths import adapter_path
from mobizo.connection import Connection
from shared.protocol import AdapterGrantView


class AdapterGrants:
    """Grants of adapters to devices. A device needs no grant for an adapter that it trained.

    All methods raise AdapterNotFound.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self, name: str) -> Iterator[AdapterGrantView]:
        """Yields the grants of an adapter, newest first."""
        for item in self._connection.pages(f"{adapter_path(name)}/devices"):
            yield AdapterGrantView.model_validate(item)

    def create(self, name: str, device_id: str) -> AdapterGrantView:
        """Lets a device download the adapter's published versions. Raises NotFound for an unknown device."""
        return AdapterGrantView.model_validate(self._connection.send("PUT", _grant_path(name, device_id)))

    def revoke(self, name: str, device_id: str) -> None:
        """Revokes a grant, if there is one. Versions that were already downloaded remain on the device."""
        self._connection.transport.request("DELETE", _grant_path(name, device_id))


def _grant_path(name: str, device_id: str) -> str:
    return f"{adapter_path(name)}/devices/{quote(device_id, safe='')}"
