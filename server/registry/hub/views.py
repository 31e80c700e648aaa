"""Converts adapters, versions and files to the schemas of the Hub API.

A Hub repository is a git repository whose large files are pointers of Git LFS. Adapters are described as if every file
were such a pointer, which follows from its sha256 and size alone; clients then check the file's own sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from server.identity.tokens import Principal
from server.registry.files import AdapterFile
from server.registry.hub.schemas import (
    AccessToken,
    Account,
    Auth,
    Author,
    CommitInfo,
    LastCommit,
    ModelInfo,
    Ref,
    Refs,
    Sibling,
    SiblingPointer,
    TreeEntry,
    TreePointer,
)
from server.registry.hub.service import Snapshot
from server.registry.models import Adapter, StoredVersion
from shared.registry import MAIN, VersionState

LIBRARY = "peft"
TAGS = (LIBRARY, "safetensors", "lora", "mobizo")
CARD = {"library_name": LIBRARY, "tags": ["lora", "mobizo"]}  # as README.md begins
_PROPERTIES = {field.alias or name: name for name, field in ModelInfo.model_fields.items()}


def pointer(sha256: str, size: int) -> bytes:
    """Returns the pointer file of Git LFS (specification version 1)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def blob_id(content: bytes) -> str:
    """Returns the git object id of a file's content: 40 hexadecimal digits."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()


def described(adapter: Adapter, version: StoredVersion | None) -> ModelInfo:
    """Returns an adapter as lists show it. version: its `main`, if it has one."""
    name = f"{adapter.tenant}/{adapter.name}"
    return ModelInfo(
        id=name,
        model_id=name,
        author=adapter.tenant,
        sha=None if version is None else version.revision,
        created_at=adapter.created_at,
        last_modified=adapter.created_at if version is None else version.created_at,
        private=True,
        gated=False,
        disabled=False,
        library_name=LIBRARY,
        tags=list(TAGS),
    )


def model_info(snapshot: Snapshot, files: Sequence[AdapterFile], *, blobs: bool) -> ModelInfo:
    """Returns an adapter at a version. blobs: includes sizes and hashes of its files."""
    siblings = [_sibling(file) if blobs else Sibling(rfilename=file.path) for file in files]
    more = {"sha": snapshot.commit, "card_data": CARD, "siblings": siblings, "used_storage": sum(f.size for f in files)}
    return described(snapshot.adapter, snapshot.version).model_copy(update=more)


def only(info: ModelInfo, properties: Iterable[str]) -> ModelInfo:
    """Returns the properties that `expand` requests, without those that this server does not have."""
    names = {"id"} | {_PROPERTIES[name] for name in properties if name in _PROPERTIES}
    return ModelInfo(**{name: getattr(info, name) for name in names})


def _sibling(file: AdapterFile) -> Sibling:
    content = pointer(file.sha256, file.size)
    where = SiblingPointer(sha256=file.sha256, size=file.size, pointer_size=len(content))
    return Sibling(rfilename=file.path, size=file.size, blob_id=blob_id(content), lfs=where)


def tree_entry(snapshot: Snapshot, file: AdapterFile, *, expand: bool) -> TreeEntry:
    """Returns a file of a listing. expand: includes its version."""
    content = pointer(file.sha256, file.size)
    where = TreePointer(oid=file.sha256, size=file.size, pointer_size=len(content))
    last = LastCommit(id=snapshot.commit, title=_title(snapshot.version), date=snapshot.version.created_at)
    return TreeEntry(
        path=file.path, size=file.size, oid=blob_id(content), lfs=where, last_commit=last if expand else None
    )


def _title(version: StoredVersion) -> str:
    state = "" if version.state is VersionState.APPROVED else f" ({version.state})"
    return f"Version {version.version}{state}"


def refs(main: str | None, names: Iterable[tuple[str, str]], *, pull_requests: bool) -> Refs:
    """Returns the refs. main: the revision that is `main`. names: (name, revision) of all others."""
    return Refs(
        branches=[] if main is None else [Ref(name=MAIN, ref=f"refs/heads/{MAIN}", target_commit=main)],
        tags=[Ref(name=name, ref=f"refs/tags/{name}", target_commit=commit) for name, commit in names],
        pull_requests=[] if pull_requests else None,
    )


def commits(adapter: Adapter, versions: Iterable[StoredVersion]) -> list[CommitInfo]:
    """Returns versions as a commit history."""
    return [
        CommitInfo(
            id=version.revision,
            title=_title(version),
            message=version.message,
            authors=[Author(user=adapter.user)],
            date=version.created_at,
        )
        for version in versions
        if version.revision is not None
    ]


def account(principal: Principal) -> Account:
    """Returns the caller's account."""
    fullname = principal.user or principal.name or str(principal.role)
    auth = Auth(access_token=AccessToken(display_name=principal.name or principal.token_id))
    return Account(id=principal.token_id, name=principal.tenant, fullname=fullname, auth=auth)
