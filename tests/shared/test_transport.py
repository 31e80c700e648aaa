"""The transport against a real HTTP server on loopback that misbehaves on purpose."""

import hashlib
import json

import pytest

from shared import transport as transport_module
from shared.errors import MobizoError, NotFound, TooManyRequests, Unavailable, Untrusted
from shared.request_signature import RequestSigner, parse_signature
from shared.signing import new_private_key
from shared.transport import Transport, Unreachable
from tests.certificate import loopback_certificate
from tests.http_server import Handler, http_server

BODY = bytes(range(256)) * 5000
SHA = hashlib.sha256(BODY).hexdigest()


class Answers(Handler):
    def post(self):
        body = self.body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.signed.append((parse_signature(headers), body, self.path))
        self.answer(503 if len(self.server.signed) == 1 else 200, b"{}")

    def get(self):
        is_first = all(path != self.path for path, _ in self.server.requests)
        self.server.requests.append((self.path, dict(self.headers)))
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if self.path == "/file":
            self.answer(206 if start else 200, BODY[start:])
        elif self.path == "/drops":
            self.answer(206 if start else 200, BODY[start : start + 500_000], Content_Length=len(BODY) - start)
        elif self.path == "/ignores-range":
            self.answer(200, BODY)
        elif self.path == "/wrong":
            self.answer(200, BODY[:-1] + b"!")
        elif self.path == "/longer":
            self.answer(200, BODY + b"!")
        elif self.path == "/busy-once":
            self.answer(503 if is_first else 200, b"{}")
        elif self.path.startswith("/limited"):
            seconds = self.path.rpartition("-")[2]
            problem = json.dumps(TooManyRequests("slower", retry_after_seconds=int(seconds)).problem()).encode()
            if is_first:
                self.answer(429, problem, Retry_After=seconds)
            else:
                self.answer(200, BODY if "file" in self.path else b"{}")
        elif self.path == "/events":
            text = b'id: 1\nevent: job\ndata: {"a":\ndata: 1}\n\n: keep-alive\n\nid: 2\ndata: x\n\n'
            self.answer(200, text, Content_Type="text/event-stream")
        elif self.path.startswith("/sent-to/"):
            self.answer(307, b"", Location=self.server.other_host + self.path.removeprefix("/sent-to"))
        elif self.path == "/round-and-round":
            self.answer(302, b"", Location=self.path)
        elif self.path == "/expires":
            self.answer(403, b"<Error/>") if is_first else self.answer(206 if start else 200, BODY[start:])
        elif self.path == "/refused":
            self.answer(403, b"<Error/>")
        elif self.path == "/misplaced":
            content_range = f"bytes 5-{len(BODY) - 1}/{len(BODY)}"
            self.answer(206, BODY[5:], Content_Range=content_range)
        elif self.path == "/proxy":
            self.answer(502, b"<html>")
        elif self.path == "/html":
            self.answer(500, b"<html>")
        else:
            self.answer(404, json.dumps(NotFound("gone fishing").problem()).encode())


def serving(certificate=None):
    return http_server(Answers, certificate, requests=[], signed=[])


@pytest.fixture
def server():
    with serving() as http:
        yield http


@pytest.fixture
def other_host(server):
    """Another host, to which the server redirects requests for /sent-to/..."""
    with serving() as http:
        server.other_host = http.url
        http.other_host = server.url
        yield http


@pytest.fixture
def transport(server):
    with Transport(f"http://127.0.0.1:{server.server_port}", "secret") as client:
        yield client


def test_problem_documents_are_raised_as_the_servers_error(transport):
    with pytest.raises(NotFound, match="gone fishing"):
        transport.request("GET", "/nothing")
    with pytest.raises(MobizoError, match="500"):
        transport.request("GET", "/html")


def test_a_busy_server_is_retried_with_the_token(transport, server):
    assert transport.request("GET", "/busy-once").json() == {}
    assert len(server.requests) == 2
    assert server.requests[0][1]["Authorization"] == "Bearer secret"


@pytest.fixture
def pauses(monkeypatch):
    """Records the requested pauses without sleeping."""
    recorded = []
    monkeypatch.setattr(transport_module.time, "sleep", recorded.append)
    return recorded


@pytest.mark.parametrize("retry", [True, False])
def test_a_rate_limited_request_is_retried_after_the_stated_delay(transport, server, pauses, retry):
    assert transport.request("GET", "/limited-7", retry=retry).json() == {}
    assert len(server.requests) == 2
    assert [7 <= seconds < 8 for seconds in pauses] == [True]


def test_a_long_retry_after_raises_at_once(transport, server, pauses):
    with pytest.raises(TooManyRequests) as caught:
        transport.request("GET", "/limited-31")
    assert caught.value.extra["retry_after_seconds"] == 31
    assert pauses == []
    assert len(server.requests) == 1


def test_a_rate_limited_download_waits(transport, server, pauses, tmp_path):
    transport.download("/limited-file-9", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    assert [9 <= seconds < 10 for seconds in pauses] == [True]


def test_requests_without_retry_are_sent_once(transport, server, pauses):
    with pytest.raises(MobizoError):
        transport.request("GET", "/busy-once", retry=False)
    assert (len(server.requests), pauses) == (1, [])


def test_a_download_is_complete_verified_and_atomic(transport, tmp_path):
    progress_calls = []
    transport.download(
        "/file",
        tmp_path / "f",
        size=len(BODY),
        sha256=SHA,
        progress=lambda *arguments: progress_calls.append(arguments),
    )
    assert (tmp_path / "f").read_bytes() == BODY
    assert progress_calls[-1] == (len(BODY), len(BODY))
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("path", ["/drops", "/ignores-range"])
def test_a_dropped_download_resumes(transport, server, tmp_path, path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    transport.download(path, tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.requests[0][1]["Range"] == "bytes=100000-"
    assert server.requests[0][1]["If-Range"] == f'"{SHA}"'


@pytest.mark.parametrize("path", ["/wrong", "/longer", "/sent-to/wrong", "/sent-to/longer"])
def test_a_download_with_another_hash_is_deleted(transport, other_host, tmp_path, path):
    with pytest.raises(Untrusted):
        transport.download(path, tmp_path / "f", size=len(BODY), sha256=SHA)
    assert not (tmp_path / "f").exists()


def test_events(transport):
    assert list(transport.events("/events")) == [("job", "1", '{"a":\n1}'), ("message", "2", "x")]


def test_no_server_is_one_clear_error():
    with Transport("http://127.0.0.1:1", attempts=2) as transport, pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        transport.request("GET", "/")


def test_a_file_of_another_host_is_fetched_without_our_token(transport, server, other_host, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    (_, own_headers), (path, other_headers) = server.requests[0], other_host.requests[0]
    assert path == "/file"
    assert own_headers["Authorization"] == "Bearer secret"
    assert own_headers["If-Range"] == f'"{SHA}"'
    assert "Authorization" not in other_headers
    assert "If-Range" not in other_headers
    assert other_headers["Range"] == "bytes=100000-"


def test_a_redirect_to_the_same_host_keeps_the_token(transport, server, tmp_path):
    server.other_host = server.url
    transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert [headers["Authorization"] for _, headers in server.requests] == ["Bearer secret"] * 2


def test_a_redirect_back_to_the_server_carries_no_token(transport, server, other_host, tmp_path):
    transport.download("/sent-to/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert [path for path, _ in server.requests] == ["/sent-to/sent-to/file", "/file"]
    assert "Authorization" not in server.requests[1][1]


@pytest.mark.parametrize("path", ["/drops", "/ignores-range", "/expires"])
def test_a_failed_download_from_another_host_is_retried_through_the_server(
    transport, server, other_host, tmp_path, path
):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    transport.download(f"/sent-to{path}", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    assert len(server.requests) == len(other_host.requests)


def test_a_permanent_error_of_another_host_is_raised(server, other_host, tmp_path):
    with Transport(server.url, attempts=2) as transport, pytest.raises(Unreachable, match="403"):
        transport.download("/sent-to/refused", tmp_path / "f", size=len(BODY), sha256=SHA)


def test_a_response_with_the_wrong_range_is_not_appended(server, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    with Transport(server.url, attempts=1) as transport, pytest.raises(Unreachable):
        transport.download("/misplaced", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f.part").read_bytes() == BODY[:100_000]


def test_redirect_loops_are_rejected(transport, tmp_path):
    with pytest.raises(MobizoError, match="redirected"):
        transport.download("/round-and-round", tmp_path / "f", size=len(BODY), sha256=SHA)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_other_kinds_of_address_are_refused(transport, server, tmp_path, target):
    server.other_host = target
    with pytest.raises(MobizoError):
        transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert not (tmp_path / "f").exists()


def test_redirects_from_https_to_http_are_rejected(server, tmp_path, monkeypatch):
    certificate = loopback_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with serving(certificate) as encrypted, Transport(encrypted.url, "secret") as transport:
        encrypted.other_host = server.url
        with pytest.raises(Untrusted, match="not encrypted"):
            transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
        assert server.requests == []
        transport.download("/file", tmp_path / "f", size=len(BODY), sha256=SHA)


def test_each_attempt_is_signed_with_a_new_nonce(server):
    key = new_private_key()
    url = f"http://127.0.0.1:{server.server_port}"
    with Transport(url, signer=RequestSigner(key, lambda: 1_700_000_000)) as transport:
        transport.request("POST", "/a b/ü", json={"x": "é"}, params={"q": "1 2"})
        transport.request("GET", "/busy-once")
    assert len({signature.nonce for signature, _, _ in server.signed}) == len(server.signed) == 2
    for signature, body, sent in server.signed:
        signature.verify(key.public_key(), "POST", *sent.split("?"))
        assert signature.digest == hashlib.sha256(body).digest()
    assert not any("Signature" in headers for _, headers in server.requests)


def test_a_proxy_whose_server_is_away_says_so_without_a_problem(transport, monkeypatch):
    monkeypatch.setattr("shared.transport.time.sleep", lambda _seconds: None)
    with pytest.raises(Unavailable, match="502"):
        transport.request("GET", "/proxy")
