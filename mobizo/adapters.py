"""The client's adapters: listed, described, downloaded. Knows their routes; HTTP is the transport's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mobizo.connection import Connection
from shared.errors import RevisionNotFound, Untrusted
from shared.protocol import AdapterVersion, AdapterView, PeftListing


class Adapters(Connection):
    """The registry of one tenant."""

    def adapters(self) -> Iterator[AdapterView]:
        """Every adapter of the tenant."""
        for item in self._pages("/v1/adapters"):
            yield AdapterView.model_validate(item)

    def adapter(self, name: str) -> AdapterView:
        """One adapter with its latest version."""
        return AdapterView.model_validate(self._get(f"/v1/adapters/{name}"))

    def adapter_version(self, name: str, version: int) -> AdapterVersion:
        """One immutable version."""
        return AdapterVersion.model_validate(self._get(f"/v1/adapters/{name}/versions/{version}"))

    def pull(self, name: str, directory: Path, version: int | None = None) -> AdapterVersion:
        """Writes a version (`main` by default) as a PEFT directory; every file is checked against its sha256.

        Raises Untrusted for a file that does not match or whose name leaves the directory, RevisionNotFound if there is
        no `main`.
        """
        if version is None:
            version = self.adapter(name).main
            if version is None:
                raise RevisionNotFound(f"no version of adapter {name!r} is approved yet; say which one to pull")
        found = self.adapter_version(name, version)
        root = f"/v1/adapters/{name}/versions/{version}/peft"
        listing = PeftListing.model_validate(self._get(root))
        directory.mkdir(parents=True, exist_ok=True)
        for file in listing.files:
            if Path(file.path).name != file.path or file.path in ("", ".", ".."):
                raise Untrusted(f"the server names a file {file.path!r}, which is no plain file name")
            target = directory / file.path
            self._transport.download(f"{root}/{file.path}", target, size=file.size, sha256=file.sha256)
        return found
