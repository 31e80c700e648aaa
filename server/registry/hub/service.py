"""Finds adapters as repositories, by caller, `tenant/name`, revision and path, and describes them to huggingface_hub.

A Hub repository is a git repository whose large files are pointers of Git LFS. Adapters are described as if every file
were such a pointer; clients then check the file's own sha256, and no client asks for the pointer. Likes, downloads and
scans do not exist here. No Xet hash is sent: clients would look for a store of chunks, which this server
lacks, and without the hash they fetch whole files over HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from server.identity.tokens import Principal
from server.registry.files import find
from server.registry.hub.refusals import NotReleased
from server.registry.models import Adapter, StoredPeftFile, StoredVersion
from server.registry.repository import find_adapter, find_version
from server.web.state import AppState
from shared.errors import AdapterNotFound, FileNotInAdapter, RevisionNotFound, UnsupportedFormat
from shared.registry import MAIN

LIBRARY = "peft"
TAGS = [LIBRARY, "safetensors", "lora", "mobizo"]
CARD = {"library_name": LIBRARY, "tags": ["lora", "mobizo"]}  # as README.md begins
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # there are no folders, so nothing leads out of one


@dataclass(frozen=True)
class Snapshot:
    """An adapter at one of its versions."""

    adapter: Adapter
    version: StoredVersion

    @property
    def id(self) -> str:
        """tenant/name."""
        return f"{self.adapter.tenant}/{self.adapter.name}"


def find_snapshot(state: AppState, caller: str, tenant: str, name: str, revision: str) -> Snapshot:
    """Returns an adapter at a revision, if a caller of the tenant `caller` may read it.

    Raises AdapterNotFound, the same for another tenant's, RevisionNotFound, or NotReleased if it has no `main`.
    """
    with state.database.reading() as session:
        adapter = _adapter(session, caller, tenant, name)
        try:
            version = find_version(session, adapter, revision)
        except RevisionNotFound:
            if revision == MAIN:
                raise NotReleased from None
            raise
    return Snapshot(adapter, version)


def _adapter(session: Session, caller: str, tenant: str, name: str) -> Adapter:
    if tenant == caller:
        with suppress(AdapterNotFound):
            return find_adapter(session, tenant, name)
    raise AdapterNotFound(f"there is no adapter {tenant[:100]}/{name[:100]} here, or it is not yours")


def find_file(state: AppState, snapshot: Snapshot, path: str) -> StoredPeftFile:
    """Returns a file, listed or not. Raises FileNotInAdapter."""
    if not _FILE.fullmatch(path):
        raise absent(snapshot)
    try:
        return find(state, snapshot.version, path)
    except FileNotInAdapter:
        raise absent(snapshot) from None
    except UnsupportedFormat as error:
        # An unsupported format counts as a missing file, because clients try several file names.
        raise FileNotInAdapter(error.detail, revision=snapshot.version.revision) from None


def absent(snapshot: Snapshot) -> FileNotInAdapter:
    """Returns the error for a missing path."""
    return FileNotInAdapter(f"version {snapshot.version.version} has no such file", revision=snapshot.version.revision)


def model_info(snapshot: Snapshot, files: Sequence[StoredPeftFile]) -> dict[str, Any]:
    """Describes an adapter at a version: its id `tenant/name`, and `sha`, the version's revision."""
    return {
        "id": snapshot.id,
        "modelId": snapshot.id,
        "author": snapshot.adapter.tenant,
        "sha": snapshot.version.revision,
        "createdAt": snapshot.adapter.created_at,
        "lastModified": snapshot.version.created_at,
        "private": True,
        "gated": False,
        "disabled": False,
        "library_name": LIBRARY,
        "tags": TAGS,
        "cardData": CARD,
        "siblings": [{"rfilename": file.path} for file in files],
        "usedStorage": sum(file.size for file in files),
    }


def tree_entry(file: StoredPeftFile) -> dict[str, Any]:
    """Describes a file of a listing. There are no folders."""
    large_file = {"oid": file.sha256, "size": file.size, "pointerSize": 0}
    return {"type": "file", "path": file.path, "size": file.size, "oid": file.sha256[:40], "lfs": large_file}


def account(principal: Principal) -> dict[str, Any]:
    """Describes the account of a token. `name` is the tenant, which clients put before repository names."""
    return {
        "type": "user",
        "id": principal.token_id,
        "name": principal.tenant,
        "fullname": principal.user or principal.name or str(principal.role),
        "isPro": False,
        "orgs": [],
        "auth": {
            "type": "access_token",
            "accessToken": {"displayName": principal.name or principal.token_id, "role": "read"},
        },
    }
