"""Files in an S3-compatible bucket: `objects/ab/abcd...` under a prefix.

A small file is created only if it is absent (If-None-Match); a large file is uploaded in parts, directly from the disk.
The service checks the sha256 of each part. A file that is stored again is not uploaded again: the time is recorded by
an empty object `stored/abcd...`. Other tools must not change objects under these two prefixes. The parts of
uploads that a killed process left are removed by a lifecycle rule of the bucket (docs/operations.md).
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
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from server.storage.store import ArtifactStore, StoredFile
from shared.errors import NotFound, Unavailable

if TYPE_CHECKING:
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
        size = self._size(sha256)
        if size is None:
            raise NotFound
        return size

    def stored_at(self, sha256: str) -> datetime | None:
        """Returns when a file was last stored; None if it is absent."""
        times = [self._changed_at(self._key(sha256)), self._changed_at(self._mark(sha256))]
        return None if times[0] is None else max(time for time in times if time is not None)

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
        self._store_small(data, len(data), sha256) if len(data) <= PART_BYTES else self._store_large(data, sha256)

    def _take(self, path: Path, sha256: str) -> None:
        size = path.stat().st_size
        self._store_small(path, size, sha256) if size <= PART_BYTES else self._store_large(path, sha256)

    def _store_small(self, content: bytes | Path, size: int, sha256: str) -> None:
        with _errors_translated():
            try:
                obstore.put(self._store, self._key(sha256), content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if not self._renew(sha256, size):
                    obstore.put(self._store, self._key(sha256), content, mode="overwrite", use_multipart=False)

    def _store_large(self, content: bytes | Path, sha256: str) -> None:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        with _errors_translated():
            if self._renew(sha256, size):
                return
            # Concurrent uploads of a file write the same bytes.
            obstore.put(
                self._store,
                self._key(sha256),
                content,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

    def _renew(self, sha256: str, size: int) -> bool:
        """Updates the time of a file. Returns False if it is absent or has another size."""
        if self._size(sha256) != size:
            return False
        obstore.put(self._store, self._mark(sha256), b"", mode="overwrite")
        return True

    def _size(self, sha256: str) -> int | None:
        with _errors_translated():
            try:
                return obstore.head(self._store, self._key(sha256))["size"]
            except FileNotFoundError:
                return None

    def _changed_at(self, key: str) -> datetime | None:
        with _errors_translated():
            try:
                return obstore.head(self._store, key)["last_modified"].astimezone(UTC)
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
