"""`client.adapters`: list, compare, approve, delete and download adapters and their versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mobizo.adapter_paths import adapter_path, find_version, version_path
from mobizo.connection import Resource
from mobizo.downloads import DownloadProgress, Format, download_version, fetch_manifest
from shared.protocol import AdapterVersion, AdapterView
from shared.registry import AdapterEvent, AdapterManifest, Comparison, VersionState


class Adapters(Resource):
    """Adapters of the tenant.

    name: an adapter's name. revision: `main`, a version's number (7, "7" or "v7"), or the first 7 to 40 digits
    of a version's `revision`. reason: a text for the audit trail. All methods raise AdapterNotFound and
    RevisionNotFound.
    """

    def list(self, *, deleted: bool = False) -> Iterator[AdapterView]:
        """Yields all adapters, newest first; with `deleted`, the deleted adapters that can be restored instead."""
        return self._connection.pages(AdapterView, "/v1/adapters", deleted=deleted or None)

    def get(self, name: str) -> AdapterView:
        """Returns an adapter with its latest version and its `main`."""
        return self._connection.get(AdapterView, adapter_path(name))

    def versions(self, name: str, state: VersionState | None = None) -> Iterator[AdapterVersion]:
        """Yields an adapter's versions, newest first, including deleted ones. state: only versions in this state."""
        return self._connection.pages(AdapterVersion, f"{adapter_path(name)}/versions", state=state)

    def version(self, name: str, revision: str | int = "main") -> AdapterVersion:
        """Returns the version that a revision names."""
        return find_version(self._connection, name, revision)

    def compare(self, name: str, left: str | int, right: str | int = "main", *, other: str | None = None) -> Comparison:
        """Returns the differences between two versions. other: the adapter of the right version; None: `name`."""
        path = f"{adapter_path(name)}/compare"
        return self._connection.get(Comparison, path, left=left, right=right, other=other)

    def events(self, name: str) -> Iterator[AdapterEvent]:
        """Yields the audit trail of an adapter, newest first. Deleted adapters keep their audit trail."""
        return self._connection.pages(AdapterEvent, f"{adapter_path(name)}/events")

    def manifest(self, name: str, revision: str | int = "main") -> AdapterManifest:
        """Returns a version's manifest after verifying the server's signature. Raises Untrusted."""
        return fetch_manifest(self._connection, self.version(name, revision))[0]

    def card(self, name: str, revision: str | int = "main") -> str:
        """Returns a version's model card, in Markdown."""
        path = f"{version_path(self.version(name, revision))}/peft/README.md"
        return self._connection.transport.request("GET", path).text

    def download(
        self,
        name: str,
        directory: Path,
        revision: str | int = "main",
        format: Format | str = Format.PEFT,
        *,
        base_sha256: str | None = None,
        progress: DownloadProgress | None = None,
    ) -> AdapterVersion:
        """Writes a version's files to a directory and returns the version.

        Files that are already complete are not downloaded again, and interrupted downloads are resumed. The signed
        manifest `mobizo.json` is written last: its presence means that all other files are complete.

        base_sha256: sha256 of the base model that you use. progress: called with the file name, the bytes so far and
        the bytes in total. Raises BaseMismatch if the adapter was trained on another base model, Untrusted if a file or
        a signature does not match.
        """
        version = self.version(name, revision)
        download_version(self._connection, version, directory, Format(format), base_sha256, progress)
        return version

    def promote(self, name: str, revision: str | int, reason: str = "") -> AdapterView:
        """Makes an approved version `main`. Raises Conflict if the version is not approved."""
        body = {"revision": str(revision), "reason": reason}
        return self._connection.send(AdapterView, "POST", f"{adapter_path(name)}/promote", body)

    def approve(self, name: str, revision: str | int, reason: str = "") -> AdapterVersion:
        """Approves a held version. It becomes `main` unless a later version is approved already."""
        path = f"{version_path(self.version(name, revision))}/approve"
        return self._connection.send(AdapterVersion, "POST", path, {"reason": reason})

    def delete(self, name: str, revision: str | int | None = None, reason: str = "") -> AdapterView | AdapterVersion:
        """Deletes a version, or the adapter if `revision` is None, and returns it.

        It can be restored until the time `removed_after`.
        """
        if revision is None:
            return self._connection.send(AdapterView, "DELETE", adapter_path(name), reason=reason or None)
        path = version_path(self.version(name, revision))
        return self._connection.send(AdapterVersion, "DELETE", path, reason=reason or None)

    def undelete(self, name: str, version: int | None = None, reason: str = "") -> AdapterView | AdapterVersion:
        """Restores a deleted version by its number, or the deleted adapter if `version` is None."""
        body = {"reason": reason}
        if version is None:
            return self._connection.send(AdapterView, "POST", f"{adapter_path(name)}/undelete", body)
        path = f"{adapter_path(name)}/versions/{version}/undelete"
        return self._connection.send(AdapterVersion, "POST", path, body)
