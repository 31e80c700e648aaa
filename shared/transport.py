"""HTTP client: requests, errors, retries and resumed downloads.

This is the only module that imports an HTTP library.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import re
import ssl
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

_SAFE_METHODS = frozenset({"GET", "HEAD"})
TOO_MANY_REQUESTS = 429
RETRIED_STATUS = frozenset({TOO_MANY_REQUESTS, 502, 503, 504})
MAX_WAIT = 30.0  # seconds; longer waits are raised as errors
MAX_REDIRECTS = 3
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
ByteProgress = Callable[[int, int], None]  # bytes so far, bytes in all


class Unreachable(Unavailable, title="Server unreachable"):
    """The server cannot be reached; check its address and that it runs."""


class Transport:
    """An HTTP connection to one mobizo server.

    It may be kept for the life of a process and must be closed at the end.
    """

    def __init__(
        self,
        server: str,
        token: str | None = None,
        *,
        timeout: float = 60.0,
        attempts: int = 4,
        signer: RequestSigner | None = None,
    ) -> None:
        """server: base URL. token: bearer token. timeout: seconds without data. attempts: maximum tries of a request.

        signer: signs every request that may change something, each try with a new nonce. Raises Unreachable for an
        invalid URL.
        """
        headers = {"User-Agent": "mobizo"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            self._http = httpx.Client(base_url=server.rstrip("/"), headers=headers, timeout=timeout, verify=_tls())
        except httpx.InvalidURL as error:
            raise Unreachable(f"{server!r} is not a URL such as http://127.0.0.1:8000") from error
        self._other_hosts: httpx.Client | None = None
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
        if self._other_hosts is not None:
            self._other_hosts.close()

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
        """Sends one request. A problem document is raised as the error that it names.

        retry: whether the request may be sent twice. Lost connections and busy servers are then retried with jittered
        exponential backoff, or when the server says (Retry-After). A request rejected by a rate limit had no effect and
        is always retried. Raises Unreachable if there was no response.
        """
        retry_after = 0.0  # seconds that the server asks to wait
        for attempt in range(self._attempts):
            if attempt:
                _sleep_before_retry(attempt, retry_after)
            retry_after = 0.0
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
                response = self._http.send(self._sign(request))
            except httpx.HTTPError as error:
                if last or not retry:
                    raise Unreachable(f"{self.server} cannot be reached ({error})") from error
                continue
            except httpx.InvalidURL as error:
                raise Unreachable(f"{self.server!r} is not a URL such as http://127.0.0.1:8000") from error
            if not last and response.status_code in (RETRIED_STATUS if retry else (TOO_MANY_REQUESTS,)):
                retry_after = _retry_after(response)
                if retry_after <= MAX_WAIT:
                    continue
            raise_problem(response)
            return response
        raise AssertionError("unreachable")

    def _sign(self, request: httpx.Request) -> httpx.Request:
        if self._signer is not None and request.method not in _SAFE_METHODS:
            path, query = request.url.raw_path.partition(b"?")[::2]
            request.headers.update(self._signer.headers(request.method, path.decode(), query.decode(), request.read()))
        return request

    def events(
        self, path: str, *, last_event_id: str | None = None, body: Any = None
    ) -> Iterator[tuple[str, str, str]]:
        """Yields (event, id, data) of a text/event-stream until it ends. body: JSON to POST; None: a GET."""
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
        """Downloads a file of known size and sha256 to `target`, atomically.

        It resumes the `.part` file of an earlier try.

        Raises Untrusted if the data does not match (it is then deleted), Unreachable if the download does not complete.
        """
        part_file = target.with_name(target.name + ".part")
        retry_after = 0.0
        for attempt in range(self._attempts):
            if attempt:
                _sleep_before_retry(attempt, retry_after)
            retry_after = 0.0
            try:
                self._fetch(path, part_file, size, sha256, progress)
                break
            except TooManyRequests as error:
                delay = error.extra.get("retry_after_seconds")
                retry_after = float(delay) if isinstance(delay, int | float) and delay >= 0 else 0.0
                if attempt == self._attempts - 1 or retry_after > MAX_WAIT:
                    raise
            except httpx.HTTPError as error:
                if attempt == self._attempts - 1:
                    raise Unreachable(f"{self.server} dropped a download ({error}); it resumes next time") from error
        if part_file.stat().st_size != size or file_sha256(part_file) != sha256:
            part_file.unlink()
            raise Untrusted(f"{target.name}: the download does not have the size and sha256 in its manifest")
        part_file.replace(target)

    def _fetch(self, path: str, part_file: Path, size: int, sha256: str, progress: ByteProgress | None) -> None:
        received = part_file.stat().st_size if part_file.exists() else 0
        if received > size:
            part_file.unlink()
            received = 0
        if received == size and size > 0:
            return
        headers = {"Accept-Encoding": "identity"}
        if received:
            headers |= {"Range": f"bytes={received}-", "If-Range": f'"{sha256}"'}
        with self._open_file(path, headers) as response:
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "")) if resumed else None
            if content_range is not None and (
                int(content_range[1]) != received or content_range[2] not in (str(size), "*")
            ):
                raise httpx.RemoteProtocolError(f"asked for {received} to {size}, it sent {content_range[0]}")
            received = received if resumed else 0
            with part_file.open("ab" if resumed else "wb") as file:
                # Raw chunks are written as they arrive, so that a lost connection loses nothing already received.
                for chunk in response.iter_raw():
                    received += len(chunk)
                    if received > size:
                        raise Untrusted(f"{part_file.name}: the server sent more bytes than the manifest states")
                    file.write(chunk)
                    if progress is not None:
                        progress(received, size)
        if received < size:
            raise httpx.RemoteProtocolError(f"{received} of {size} bytes arrived")

    @contextmanager
    def _open_file(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """The response (200 or 206) of a file, after redirects.

        Another host gets neither the token nor If-Range, whose tag is one of our server's; the download is verified by
        its hash. An unexpected status of another host is retried from the start, because its URL may have expired.
        """
        request = self._http.build_request("GET", path, headers=headers)
        original_url = request.url
        for _ in range(MAX_REDIRECTS + 1):
            is_own_server = _same_origin(request.url, original_url)
            response = (self._http if is_own_server else self._client_for_other_hosts()).send(request, stream=True)
            if not response.has_redirect_location:
                break
            response.close()
            request = self._redirected(response, original_url, headers)
        else:
            raise MobizoError(f"{self.server} redirected a download too many times")
        try:
            if response.status_code in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
                yield response
                return
            if not is_own_server:
                raise httpx.RemoteProtocolError(f"{request.url.host} answered {response.status_code}")
            response.read()
            raise_problem(response)
            raise MobizoError(f"the server answered {response.status_code} {response.reason_phrase}")
        finally:
            response.close()

    def _redirected(self, response: httpx.Response, original_url: httpx.URL, headers: dict[str, str]) -> httpx.Request:
        url = response.url.join(response.headers["Location"])
        if url.scheme != "https" and (url.scheme != "http" or response.url.scheme == "https"):
            raise Untrusted(f"{self.server} sent a download to {url.scheme}://{url.host}, which is not encrypted")
        if _same_origin(url, original_url) and _same_origin(response.url, original_url):
            return self._http.build_request("GET", url, headers=headers)
        other_headers = {name: value for name, value in headers.items() if name != "If-Range"}
        return self._client_for_other_hosts().build_request("GET", url, headers=other_headers)

    def _client_for_other_hosts(self) -> httpx.Client:
        """A client without a token, for other hosts."""
        if self._other_hosts is None:
            self._other_hosts = httpx.Client(
                headers={"User-Agent": "mobizo"}, timeout=self._http.timeout, verify=_tls()
            )
        return self._other_hosts


def post_pinned(url: str, address: str, headers: dict[str, str], body: bytes, seconds: float) -> int:
    """Sends one POST to `address`, as if the host of `url` had no other, and returns the response's status.

    TLS is verified for the host of `url`. Follows no redirect, uses no proxy, and reads no body. seconds: for all of
    it. Raises Unreachable.
    """

    async def post() -> int:
        target = httpx.URL(url)
        named = headers | {"Host": target.netloc.decode("ascii")}
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(verify=_tls(), timeout=seconds, trust_env=False) as client,
            client.stream(
                "POST",
                target.copy_with(host=address),
                content=body,
                headers=named,
                extensions={"sni_hostname": target.host},
            ) as response,
        ):
            return response.status_code

    try:
        return asyncio.run(post())
    except (TimeoutError, httpx.TimeoutException) as error:
        raise Unreachable(f"no answer within {seconds:.0f} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"the request failed ({error})") from error


def _tls() -> ssl.SSLContext:
    """Returns the TLS context of all connections: reading the authorities takes 20 to 50 ms, most of a new client."""
    return _tls_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _tls_context(_file: str | None, _directory: str | None) -> ssl.SSLContext:
    """Returns httpx's default context, which trusts the authorities that these two variables name."""
    return httpx.create_ssl_context()


def _same_origin(first: httpx.URL, second: httpx.URL) -> bool:
    ports = {"http": 80, "https": 443}
    return (first.scheme, first.host, first.port or ports.get(first.scheme)) == (
        second.scheme,
        second.host,
        second.port or ports.get(second.scheme),
    )


def _sleep_before_retry(attempt: int, retry_after: float) -> None:
    """Sleeps before a retry: longer each time, with jitter, and at least as long as the server asks."""
    time.sleep(retry_after + random.uniform(0.5, 1) * 2 ** (attempt - 1) * 0.5)


def _retry_after(response: httpx.Response) -> float:
    """Returns the seconds of Retry-After, or 0 if it is absent."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def raise_problem(response: httpx.Response) -> None:
    """Raises the error that a response's document names. Returns if the response is no error."""
    if not response.is_error:
        return
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and ("code" in document or isinstance(document.get("error"), dict)):
        raise from_problem(document)
    error_class = Unavailable if response.status_code in RETRIED_STATUS else MobizoError  # from a proxy
    raise error_class(f"the server answered {response.status_code} {response.reason_phrase}")


def _parse_events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    event, event_id = "message", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield event, event_id, "\n".join(data)
            event, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            event = value
        elif field == "id":
            event_id = value
        elif field == "data":
            data.append(value)
