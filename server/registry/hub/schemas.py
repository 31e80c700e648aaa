"""Responses of the Hub's read API, as huggingface_hub reads them. Fields that would be null are omitted.

A Hub repository is a git repository whose large files are pointers of Git LFS. Adapters are described as if every file
were such a pointer, which follows from its sha256 and size alone; clients then check the file's own sha256. Likes,
downloads and scans do not exist here. No Xet hash is sent: clients would look for a store of chunks, which this server
lacks, and without the hash they fetch whole files over HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from server.identity.tokens import Principal
from server.registry.files import AdapterFile
from server.registry.hub.service import Snapshot

LIBRARY = "peft"
TAGS = [LIBRARY, "safetensors", "lora", "mobizo"]
CARD = {"library_name": LIBRARY, "tags": ["lora", "mobizo"]}  # as README.md begins


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Sibling(_Wire):
    """A file of a model's description."""

    rfilename: str


class ModelInfo(_Wire):
    """An adapter at one of its versions."""

    id: str = Field(description="tenant/name")
    model_id: str
    author: str = Field(description="the tenant")
    sha: str = Field(description="the version's revision, 40 hexadecimal digits")
    created_at: datetime
    last_modified: datetime
    private: bool
    gated: bool
    disabled: bool
    library_name: str = Field(alias="library_name")
    tags: list[str]
    card_data: dict[str, Any]
    siblings: list[Sibling]
    used_storage: int = Field(description="bytes of the files in the listing")

    @classmethod
    def of(cls, snapshot: Snapshot, files: Sequence[AdapterFile]) -> ModelInfo:
        """Describes an adapter at a version."""
        return cls(
            id=snapshot.id,
            model_id=snapshot.id,
            author=snapshot.adapter.tenant,
            sha=snapshot.commit,
            created_at=snapshot.adapter.created_at,
            last_modified=snapshot.version.created_at,
            private=True,
            gated=False,
            disabled=False,
            library_name=LIBRARY,
            tags=TAGS,
            card_data=CARD,
            siblings=[Sibling(rfilename=file.path) for file in files],
            used_storage=sum(file.size for file in files),
        )


class TreePointer(_Wire):
    """The location of a file's content in a listing."""

    oid: str = Field(description="its sha256")
    size: int
    pointer_size: int


class TreeEntry(_Wire):
    """A file of a listing; there are no folders."""

    type: Literal["file"] = "file"
    path: str
    size: int
    oid: str = Field(description="git's name of the pointer")
    lfs: TreePointer

    @classmethod
    def of(cls, file: AdapterFile) -> TreeEntry:
        """Describes a file."""
        content = pointer(file.sha256, file.size)
        where = TreePointer(oid=file.sha256, size=file.size, pointer_size=len(content))
        return cls(path=file.path, size=file.size, oid=blob_id(content), lfs=where)


class AccessToken(_Wire):
    """The rights of a token here: reading."""

    display_name: str
    role: Literal["read"] = "read"


class Auth(_Wire):
    """The caller's means of authentication."""

    type: Literal["access_token"] = Field("access_token")
    access_token: AccessToken


class Account(_Wire):
    """The account of the request's token. `name` is the tenant, which clients put before repository names."""

    type: Literal["user"] = "user"
    id: str
    name: str
    fullname: str
    is_pro: Literal[False] = False
    orgs: list[dict[str, Any]] = []
    auth: Auth

    @classmethod
    def of(cls, principal: Principal) -> Account:
        """Describes the caller."""
        fullname = principal.user or principal.name or str(principal.role)
        auth = Auth(access_token=AccessToken(display_name=principal.name or principal.token_id))
        return cls(id=principal.token_id, name=principal.tenant, fullname=fullname, auth=auth)


def pointer(sha256: str, size: int) -> bytes:
    """Returns the pointer file of Git LFS (specification version 1)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def blob_id(content: bytes) -> str:
    """Returns the git object id of a file's content: 40 hexadecimal digits."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
