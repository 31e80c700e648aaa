"""Paths of adapters and versions, and the version that a revision names."""

from __future__ import annotations

import re

from mobizo.connection import Connection
from shared.errors import AdapterNotFound, RevisionNotFound
from shared.job import NAME
from shared.protocol import AdapterVersion

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def split_reference(text: str) -> tuple[str, str | None]:
    """Returns the adapter and the revision of `ADAPTER@REVISION`; the revision of `ADAPTER` is None."""
    name, _, revision = text.partition("@")
    return name, revision or None


def adapter_path(name: str) -> str:
    """Returns the path of an adapter's routes. Raises AdapterNotFound if `name` is not a valid name."""
    if not re.fullmatch(NAME, name):
        raise AdapterNotFound(f"there is no adapter {name!r}")
    return f"/v1/adapters/{name}"


def revision_segment(name: str, revision: str | int) -> str:
    """Returns a revision as one path segment. Raises RevisionNotFound if it cannot be one."""
    if not _SEGMENT.fullmatch(str(revision)):
        raise RevisionNotFound(f"adapter {name!r} has no version {revision!r}")
    return str(revision)


def version_path(version: AdapterVersion) -> str:
    """Returns the path of a version's routes."""
    return f"/v1/adapters/{version.adapter}/versions/{version.version}"


def find_version(connection: Connection, name: str, revision: str | int) -> AdapterVersion:
    """Returns the version that a revision names. Raises AdapterNotFound, RevisionNotFound."""
    path = f"{adapter_path(name)}/revisions/{revision_segment(name, revision)}"
    return connection.get(AdapterVersion, path)
