"""Documents of the Hub's read API, as huggingface_hub reads them.

A Hub repository is a git repository whose large files are pointers of Git LFS. Adapters are described as if every file
were such a pointer; clients then check the file's own sha256, and no client asks for the pointer. Likes, downloads and
scans do not exist here. No Xet hash is sent: clients would look for a store of chunks, which this server
lacks, and without the hash they fetch whole files over HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.identity.tokens import Principal
from server.registry.files import AdapterFile
from server.registry.hub.service import Snapshot

LIBRARY = "peft"
TAGS = [LIBRARY, "safetensors", "lora", "mobizo"]
CARD = {"library_name": LIBRARY, "tags": ["lora", "mobizo"]}  # as README.md begins


def model_info(snapshot: Snapshot, files: Sequence[AdapterFile]) -> dict[str, Any]:
    """Describes an adapter at a version: its id `tenant/name`, and `sha`, the version's revision."""
    return {
        "id": snapshot.id,
        "modelId": snapshot.id,
        "author": snapshot.adapter.tenant,
        "sha": snapshot.commit,
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


def tree_entry(file: AdapterFile) -> dict[str, Any]:
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
