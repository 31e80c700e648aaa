"""Which git objects a repository of ours would hold.

A Hub repository is a git repository whose large files are pointers of Git LFS. Ours are told as if every file were such
a pointer: it is written from the sha256 and the size alone, and clients then check a file's own sha256.
"""

from __future__ import annotations

import hashlib


def pointer(sha256: str, size: int) -> bytes:
    """Returns the pointer file of Git LFS (specification version 1)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def blob_id(content: bytes) -> str:
    """Returns the git object id of a file's content: 40 hexadecimal digits."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
