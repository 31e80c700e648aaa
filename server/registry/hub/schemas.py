"""Responses of the Hub's read API, as huggingface_hub reads them. Fields that would be null are omitted.

Said only of what this server knows: there are no likes, downloads or scans. Nothing names an Xet hash either: it would
send clients to a store of chunks that we do not have, and without it they fetch whole files over HTTP.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Commit = str  # a version's revision: 40 hex digits


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class SiblingPointer(_Wire):
    """The location of a file's content in a model's description."""

    sha256: str
    size: int
    pointer_size: int


class Sibling(_Wire):
    """A file of a model's description; all but its name only with `blobs`."""

    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: SiblingPointer | None = None


class ModelInfo(_Wire):
    """An adapter at one of its versions; with `expand` only what that asks for."""

    id: str = Field(description="tenant/name")
    model_id: str | None = None
    author: str | None = Field(None, description="the tenant")
    sha: Commit | None = None
    created_at: datetime | None = None
    last_modified: datetime | None = None
    private: bool | None = None
    gated: bool | None = None
    disabled: bool | None = None
    library_name: str | None = Field(None, alias="library_name")
    tags: list[str] | None = None
    card_data: dict[str, Any] | None = None
    siblings: list[Sibling] | None = None
    used_storage: int | None = Field(None, description="bytes of the files in the listing")


class TreePointer(_Wire):
    """The location of a file's content in a listing."""

    oid: str = Field(description="its sha256")
    size: int
    pointer_size: int


class LastCommit(_Wire):
    """The version that a file came with."""

    id: Commit
    title: str
    date: datetime


class TreeEntry(_Wire):
    """A file of a listing; there are no folders."""

    type: Literal["file"] = "file"
    path: str
    size: int
    oid: str = Field(description="git's name of the pointer")
    lfs: TreePointer
    last_commit: LastCommit | None = Field(None, description="with `expand` only")


class Ref(_Wire):
    """A name that leads to a version."""

    name: str
    ref: str
    target_commit: Commit


class Refs(_Wire):
    """All names of an adapter's versions."""

    branches: list[Ref]
    tags: list[Ref]
    converts: list[Ref] = []
    pull_requests: list[Ref] | None = Field(None, description="with `include_prs` only: there are none")


class Author(_Wire):
    """The author of a version."""

    user: str


class CommitInfo(_Wire):
    """A version in the history of an adapter."""

    id: Commit
    title: str
    message: str = ""
    authors: list[Author]
    date: datetime


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
