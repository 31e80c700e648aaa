"""HTTP, in the one module that imports an HTTP library: requests, errors, retries and resumed downloads.

A successor of httpx is one change, here. Knows no route and no mobizo file format.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from shared.canonical import file_sha256
from shared.errors import MobizoError, TooManyRequests, Unavailable, Untrusted, from_problem
from shared.request_signature import RequestSigner

_SAFE = frozenset({"GET", "HEAD"})
TOO_MANY = 429
RETRIED_STATUS = frozenset({TOO_MANY, 502, 503, 504})
MOST_WAIT = 30.0  # seconds; a server that asks for more is not waited for
MOST_REDIRECTS = 3
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
ByteProgress = Callable[[int, int], None]  # bytes so far, bytes in all


class Unreachable(Unavailable):
    """The server cannot be reached; check its address and that it runs."""

    code, title = "unreachable", "Server unreachable"


class Transport:
    """A connection to one mobizo server. Safe to keep for a process's life; close it at the end."""

    def __init__(
        self,
        server: str,
        token: str | None = None,
        *,
        timeout: float = 60.0,
        attempts: int = 4,
        signer: RequestSigner | None = None,
    ) -> None:
        """server: base URL. token: bearer token. timeout: seconds of silence. attempts: tries of a request.

        signer: signs every request that may change something; each try anew, since a nonce counts once. Raises
        Unreachable for what is no URL.
        """
        headers = {"User-Agent": "mobizo"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            self._http = httpx.Client(base_url=server.rstrip("/"), headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise Unreachable(f"{server!r} is not a URL such as http://127.0.0.1:8000") from error
        self._elsewhere: httpx.Client | None = None
        self._attempts, self._signer = attempts, signer
        self.server = server

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()
        if self._elsewhere is not None:
            self._elsewhere.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        retry: bool = True,
        timeout: float | None = None,
    ) -> httpx.Response:
        """One request; a problem document is raised as the error it names.

        retry: whether sending it twice does no harm; then lost connections and busy servers are tried again,
        with jittered exponential backoff, or when the server says (Retry-After). One that was refused as one too many
        did nothing, and is tried again in any case. Raises Unreachable when no answer came.
        """
        asked = 0.0  # seconds that the server wants to be left alone
        for attempt in range(self._attempts):
            if attempt:
                _pause(attempt, asked)
            asked = 0.0
            last = attempt == self._attempts - 1
            try:
                request = self._http.build_request(
                    method,
                    path,
                    json=json,
                    content=content,
                    params=params,
                    headers=headers,
                    timeout=httpx.USE_CLIENT_DEFAULT if timeout is None else timeout,
                )
                response = self._http.send(self._signed(request))
            except httpx.HTTPError as error:
                if last or not retry:
                    raise Unreachable(f"{self.server} cannot be reached ({error})") from error
                continue
            except httpx.InvalidURL as error:
                raise Unreachable(f"{self.server!r} is not a URL such as http://127.0.0.1:8000") from error
            if not last and response.status_code in (RETRIED_STATUS if retry else (TOO_MANY,)):
                asked = _retry_after(response)
                if asked <= MOST_WAIT:
                    continue
            raise_problem(response)
            return response
        raise AssertionError("unreachable")

    def form(self, path: str, fields: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """A form-encoded POST, tried once: the answer's status and JSON object, as OAuth has them for errors, too.

        Raises the error that a problem document names, Unreachable when no answer came, or MobizoError for another.
        """
        try:
            response = self._http.post(path, data=fields, headers={"Accept": "application/json"})
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.server} cannot be reached ({error})") from error
        except httpx.InvalidURL as error:
            raise Unreachable(f"{self.server!r} is not a URL such as http://127.0.0.1:8000") from error
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict) or (response.is_error and "error" not in document):
            raise_problem(response)
            raise MobizoError(f"{self.server} does not answer as a mobizo server")
        return response.status_code, document

    def _signed(self, request: httpx.Request) -> httpx.Request:
        if self._signer is not None and request.method not in _SAFE:
            path, query = request.url.raw_path.partition(b"?")[::2]
            request.headers.update(self._signer.headers(request.method, path.decode(), query.decode(), request.read()))
        return request

    def events(
        self, path: str, *, last_event_id: str | None = None, body: Any = None
    ) -> Iterator[tuple[str, str, str]]:
        """(event, id, data) of a text/event-stream, until the server ends it. body: JSON to POST; None: a GET."""
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        method = "GET" if body is None else "POST"
        try:
            with self._http.stream(method, path, headers=headers, json=body) as response:
                if response.is_error:
                    response.read()
                raise_problem(response)
                yield from _parse_events(response.iter_lines())
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.server} cannot be reached ({error})") from error

    def download(
        self, path: str, target: Path, *, size: int, sha256: str, progress: ByteProgress | None = None
    ) -> None:
        """Fetches a file of known size and sha256 to `target`, atomically, resuming a `.part` left by an earlier try.

        Raises Untrusted if what arrived is not that file (nothing is kept), Unreachable if it would not arrive.
        """
        part = target.with_name(target.name + ".part")
        asked = 0.0
        for attempt in range(self._attempts):
            if attempt:
                _pause(attempt, asked)
            asked = 0.0
            try:
                self._fetch(path, part, size, sha256, progress)
                break
            except TooManyRequests as error:
                said = error.extra.get("retry_after_seconds")
                asked = float(said) if isinstance(said, int | float) and said >= 0 else 0.0
                if attempt == self._attempts - 1 or asked > MOST_WAIT:
                    raise
            except httpx.HTTPError as error:
                if attempt == self._attempts - 1:
                    raise Unreachable(f"{self.server} dropped a download ({error}); it resumes next time") from error
        if part.stat().st_size != size or file_sha256(part) != sha256:
            part.unlink()
            raise Untrusted(f"{target.name}: what arrived does not have the size and sha256 that its manifest states")
        part.replace(target)

    def _fetch(self, path: str, part: Path, size: int, sha256: str, progress: ByteProgress | None) -> None:
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        if have == size and size > 0:
            return
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": f'"{sha256}"'}
        with self._file(path, headers) as response:
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            span = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "")) if resumed else None
            if span is not None and (int(span[1]) != have or span[2] not in (str(size), "*")):
                raise httpx.RemoteProtocolError(f"asked for {have} to {size}, it sent {span[0]}")
            have = have if resumed else 0
            with part.open("ab" if resumed else "wb") as file:
                # Raw pieces as they come: gathering them would lose the last ones when the link drops.
                for piece in response.iter_raw():
                    have += len(piece)
                    if have > size:
                        raise Untrusted(f"{part.name}: the server sent more bytes than the manifest states")
                    file.write(piece)
                    if progress is not None:
                        progress(have, size)
        if have < size:
            raise httpx.RemoteProtocolError(f"{have} of {size} bytes arrived")

    @contextmanager
    def _file(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """A file's response, 200 or 206, from where the server sends us for it.

        Another host is given neither token nor tag: If-Range names a tag of our server's, which has compared it
        already, and the whole is checked by its hash. What another host answers wrongly is tried again from the start,
        since its address may have run out.
        """
        request = self._http.build_request("GET", path, headers=headers)
        home = request.url
        for _ in range(MOST_REDIRECTS + 1):
            ours = _same_origin(request.url, home)
            response = (self._http if ours else self._stranger()).send(request, stream=True)
            if not response.has_redirect_location:
                break
            response.close()
            request = self._redirected(response, home, headers)
        else:
            raise MobizoError(f"{self.server} sent a download round in circles")
        try:
            if response.status_code in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
                yield response
                return
            if not ours:
                raise httpx.RemoteProtocolError(f"{request.url.host} answered {response.status_code}")
            response.read()
            raise_problem(response)
            raise MobizoError(f"the server answered {response.status_code} {response.reason_phrase}")
        finally:
            response.close()

    def _redirected(self, response: httpx.Response, home: httpx.URL, headers: dict[str, str]) -> httpx.Request:
        url = response.url.join(response.headers["Location"])
        if url.scheme != "https" and (url.scheme != "http" or response.url.scheme == "https"):
            raise Untrusted(f"{self.server} sent a download to {url.scheme}://{url.host}, which is not encrypted")
        if _same_origin(url, home) and _same_origin(response.url, home):
            return self._http.build_request("GET", url, headers=headers)
        less = {name: value for name, value in headers.items() if name != "If-Range"}
        return self._stranger().build_request("GET", url, headers=less)

    def _stranger(self) -> httpx.Client:
        """A client that knows no token."""
        if self._elsewhere is None:
            self._elsewhere = httpx.Client(headers={"User-Agent": "mobizo"}, timeout=self._http.timeout)
        return self._elsewhere


def _same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    ports = {"http": 80, "https": 443}
    return (one.scheme, one.host, one.port or ports.get(one.scheme)) == (
        other.scheme,
        other.host,
        other.port or ports.get(other.scheme),
    )


def _pause(attempt: int, asked: float) -> None:
    """Sleeps before a further try: longer each time, never all clients at once, and not less than was asked."""
    time.sleep(asked + random.uniform(0.5, 1) * 2 ** (attempt - 1) * 0.5)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 if it does not say."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def raise_problem(response: httpx.Response) -> None:
    """Raises the error that a response's problem document names; returns if the response is none."""
    if not response.is_error:
        return
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and "code" in document:
        raise from_problem(document)
    raise MobizoError(f"the server answered {response.status_code} {response.reason_phrase}")


def _parse_events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    event, event_id = "message", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield event, event_id, "\n".join(data)
            event, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "id":
            event_id = value
        elif name == "data":
            data.append(value)
