"""Files in an S3-compatible bucket: `objects/ab/abcd...` under a prefix.

A large file is uploaded in parts, directly from the disk. The service checks the sha256 of each part. A file that is
stored again is not uploaded again: the time is recorded by an empty object `stored/abcd...`. Other tools must not
change objects under these two prefixes. The parts of uploads that a killed process left are removed by a lifecycle rule
of the bucket (docs/operations.md).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from server.storage.store import ArtifactStore, StoredFile
from shared.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config

PART_BYTES = 8 << 20
PARTS_AT_ONCE = 4
PIECE_BYTES = 1 << 20  # of a stream; each is one request, so that a slow reader occupies no connection to the bucket
DELETE_AT_ONCE = 1000
_RETRY: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
_DEBUGGING = re.compile(r"\n.*", re.DOTALL)


@dataclass(frozen=True)
class BucketPlace:
    """The location of a bucket and its credentials; None: from the variables of AWS, which the library reads.

    endpoint: URL of the service. public_endpoint: URL by which devices reach it, for signed URLs.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    public_endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    allow_http: bool = False

    def __repr__(self) -> str:
        return f"BucketPlace({self.endpoint or 'AWS'}, {self.bucket}/{self.prefix})"


def _open(place: BucketPlace, endpoint: str | None) -> S3Store:
    config: S3Config = {"checksum_algorithm": "SHA256"}
    if endpoint is not None:
        config["endpoint"] = endpoint
    if place.access_key_id:
        config["access_key_id"] = place.access_key_id
    if place.secret_access_key:
        config["secret_access_key"] = place.secret_access_key
    options: ClientConfig = {"allow_http": place.allow_http, "connect_timeout": "5s", "timeout": "60s"}
    return S3Store(
        place.bucket, prefix=place.prefix or None, config=config, client_options=options, retry_config=_RETRY
    )


@contextmanager
def _errors_translated() -> Iterator[None]:
    """Translates errors of the service to Unavailable."""
    try:
        yield
    except FileNotFoundError as error:
        raise Unavailable("the bucket does not exist; create it, or correct its name") from error
    except BaseError as error:
        raise Unavailable(f"the object store failed ({_DEBUGGING.sub('', str(error))[:300]})") from error


class BucketArtifacts(ArtifactStore):
    """A bucket, or a prefix of one."""

    def __init__(self, place: BucketPlace, scratch: Path) -> None:
        """scratch: local directory of the workspaces."""
        super().__init__(scratch)
        self.place = place
        self._store = _open(place, place.endpoint)
        self._outside = _open(place, place.public_endpoint) if place.public_endpoint else self._store

    @staticmethod
    def _key(sha256: str) -> str:
        return f"objects/{sha256[:2]}/{sha256}"

    @staticmethod
    def _mark(sha256: str) -> str:
        return f"stored/{sha256}"

    def signed_url(self, sha256: str, seconds: int) -> str:
        """Returns a URL from which anyone may download the file for that many seconds."""
        with _errors_translated():
            return obstore.sign(self._outside, "GET", self._key(sha256), timedelta(seconds=seconds))

    def size(self, sha256: str) -> int:
        """Returns the size of a file, bytes. Raises NotFound."""
        head = self._head(self._key(sha256))
        if head is None:
            raise NotFound
        return head["size"]

    def stored_at(self, sha256: str) -> datetime | None:
        """Returns when a file was last stored; None if it is absent."""
        head, mark = self._head(self._key(sha256)), self._head(self._mark(sha256))
        if head is None:
            return None
        return max(each["last_modified"] for each in (head, mark) if each is not None).astimezone(UTC)

    def listing(self) -> Iterator[StoredFile]:
        """Yields every file."""
        marks = {path.rpartition("/")[2]: time for path, _, time in self._list("stored")}
        for path, size, time in self._list("objects"):
            sha256 = path.rpartition("/")[2]
            yield StoredFile(sha256, size, max(time, marks.get(sha256, time)))

    def delete(self, sha256s: Sequence[str]) -> None:
        """Removes files and the records of their times."""
        keys = [key for sha256 in sha256s for key in (self._key(sha256), self._mark(sha256))]
        with _errors_translated():
            for at in range(0, len(keys), DELETE_AT_ONCE):
                obstore.delete(self._store, keys[at : at + DELETE_AT_ONCE])

    def check_writable(self) -> None:
        """Raises Unavailable unless an object can be written to the bucket, and a file to the scratch directory."""
        super().check_writable()
        with _errors_translated():
            obstore.put(self._store, "writable", b"", mode="overwrite")

    def _write(self, data: bytes, sha256: str) -> None:
        self._upload(data, len(data), sha256)

    def _take(self, path: Path, sha256: str) -> None:
        self._upload(path, path.stat().st_size, sha256)

    def _upload(self, content: bytes | Path, size: int, sha256: str) -> None:
        """Uploads a file, or updates its time if it is stored with this size."""
        head = self._head(self._key(sha256))
        with _errors_translated():
            if head is not None and head["size"] == size:
                obstore.put(self._store, self._mark(sha256), b"", mode="overwrite")
                return
            # Concurrent uploads of a file write the same bytes.
            obstore.put(
                self._store,
                self._key(sha256),
                content,
                use_multipart=size > PART_BYTES,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

    def _head(self, key: str) -> ObjectMeta | None:
        with _errors_translated():
            try:
                return obstore.head(self._store, key)
            except FileNotFoundError:
                return None

    def _list(self, directory: str) -> Iterator[tuple[str, int, datetime]]:
        with _errors_translated():
            for batch in obstore.list(self._store, directory):
                for entry in batch:
                    yield entry["path"], entry["size"], entry["last_modified"].astimezone(UTC)

    def _whole(self, sha256: str) -> bytes:
        with _errors_translated():
            try:
                return bytes(obstore.get(self._store, self._key(sha256)).bytes())
            except FileNotFoundError as error:
                raise NotFound from error

    async def _pieces(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        key = self._key(sha256)
        for at in range(start, end, PIECE_BYTES):
            with _errors_translated():
                try:
                    piece = await obstore.get_range_async(self._store, key, start=at, end=min(at + PIECE_BYTES, end))
                except FileNotFoundError as error:
                    raise NotFound from error
            yield bytes(piece)
