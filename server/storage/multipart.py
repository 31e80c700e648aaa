"""Finds and aborts unfinished multipart uploads in an S3-compatible bucket.

Their parts occupy storage, but no listing shows them. obstore does not support these two requests, so they are signed
here (AWS Signature Version 4). This requires an access key; with other credentials (a role, a web identity), a
lifecycle rule of the bucket must abort the uploads.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from server.database.columns import utc_now
from shared.errors import Unavailable

TIMEOUT = 30.0  # seconds
_EMPTY = hashlib.sha256(b"").hexdigest()
_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)


@dataclass(frozen=True)
class Access:
    """An access key for a bucket."""

    key_id: str
    secret: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return "Access(...)"


class MultipartUploads:
    """The unfinished uploads under one prefix of a bucket."""

    def __init__(self, endpoint: str | None, bucket: str, prefix: str, region: str, access: Access | None) -> None:
        """endpoint: URL of the service; None: AWS. prefix: of the object keys. access: without it nothing is found."""
        self._base = f"{(endpoint or f'https://s3.{region}.amazonaws.com').rstrip('/')}/{bucket}"
        self._prefix, self._region, self._access = prefix, region, access

    def begun(self, before: datetime) -> list[str]:
        """Returns the names of the uploads that began before a time."""
        return [name for name, began in self._all() if began < before]

    def abort(self, name: str) -> None:
        """Aborts an upload."""
        if self._access is not None:
            upload_id, key = name.split(" ", 1)
            self._send(self._access, "DELETE", f"/{quote(key)}", {"uploadId": upload_id})

    def _all(self) -> Iterator[tuple[str, datetime]]:
        if self._access is None:
            return
        query = {"uploads": "", "prefix": self._prefix}
        while True:
            answer = self._send(self._access, "GET", "", query)
            for upload in _UPLOAD.findall(answer):
                name = f"{_text(upload, 'UploadId')} {_text(upload, 'Key')}"
                yield name, datetime.fromisoformat(_text(upload, "Initiated"))
            if _text(answer, "IsTruncated") != "true":
                return
            query |= {
                "key-marker": _text(answer, "NextKeyMarker"),
                "upload-id-marker": _text(answer, "NextUploadIdMarker"),
            }

    def _send(self, access: Access, method: str, path: str, query: dict[str, str]) -> str:
        """Returns the body of the response; empty for 404, which means that the upload no longer exists."""
        request = self._signed(access, method, path, query)
        try:
            with urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 - the operator's own setting
                return str(response.read().decode())
        except HTTPError as error:
            with error:
                if error.code == 404:
                    return ""
                raise Unavailable(f"the object store refused {method} of its uploads ({error.code})") from error
        except (URLError, TimeoutError) as error:
            raise Unavailable("the object store cannot be reached") from error

    @staticmethod
    def _key(access: Access, scope: str) -> bytes:
        key = f"AWS4{access.secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        return key

    def _signed(self, access: Access, method: str, path: str, query: dict[str, str]) -> Request:
        url = urlsplit(self._base + path)
        query_line = "&".join(
            f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items())
        )
        moment = utc_now().astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": url.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
        if access.session_token:
            headers["x-amz-security-token"] = access.session_token
        names = ";".join(sorted(headers))
        header_lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = "\n".join((method, url.path, query_line, header_lines, names, _EMPTY))
        scope = f"{moment[:8]}/{self._region}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._key(access, scope), to_sign.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={access.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return Request(f"{self._base}{path}?{query_line}", method=method, headers=headers)  # noqa: S310 - as above


def _text(answer: str, name: str) -> str:
    match = re.search(rf"<{name}>(.*?)</{name}>", answer, re.DOTALL)
    return html.unescape(match.group(1)) if match else ""
