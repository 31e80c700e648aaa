"""The client's adapters: listed, described, decided on. Knows their routes; HTTP is the transport's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mobizo.connection import Connection
from shared.errors import RevisionNotFound
from shared.protocol import AdapterVersion, AdapterView


class Adapters(Connection):
    """The registry of one tenant."""

    def adapters(self) -> Iterator[AdapterView]:
        """Every adapter of the tenant."""
        for item in self._pages("/v1/adapters"):
            yield AdapterView.model_validate(item)

    def adapter(self, name: str) -> AdapterView:
        """One adapter with its latest version."""
        return AdapterView.model_validate(self._get(f"/v1/adapters/{name}"))

    def version(self, name: str, revision: str | int = "main") -> AdapterVersion:
        """The version that a revision stands for: `main`, a number (7, "7", "v7"), a tag, digits of a revision.

        Raises AdapterNotFound, RevisionNotFound.
        """
        return AdapterVersion.model_validate(self._get(f"/v1/adapters/{name}/versions/{self._number(name, revision)}"))

    def _number(self, name: str, revision: str | int) -> int:
        number = re.fullmatch("v?([1-9][0-9]{0,9})", str(revision))
        if number is not None:
            return int(number[1])
        adapter = self.adapter(name)
        found = adapter.main if revision == "main" else adapter.tags.get(str(revision))
        if found is None:
            raise RevisionNotFound(f"adapter {name!r} has no version {revision!r}")
        return found
