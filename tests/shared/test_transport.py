"""Against a real HTTP server on loopback that misbehaves on purpose."""

import contextlib
import hashlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared import transport as transport_module
from shared.errors import MobizoError, NotFound, TooManyRequests, Untrusted
from shared.request_signature import RequestSigner, parse_signature
from shared.signing import new_private_key
from shared.transport import Transport, Unreachable
from tests.certificate import loopback_certificate

BODY = bytes(range(256)) * 5000
SHA = hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(headers.pop("length", len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.signed.append((parse_signature(headers), body, self.path))
        self.answer(503 if len(self.server.signed) == 1 else 200, b"{}")

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if self.path == "/file":
            self.answer(206 if start else 200, BODY[start:])
        elif self.path == "/drops":
            self.answer(206 if start else 200, BODY[start : start + 500_000], length=len(BODY) - start)
        elif self.path == "/ignores-range":
            self.answer(200, BODY)
        elif self.path == "/wrong":
            self.answer(200, BODY[:-1] + b"!")
        elif self.path == "/longer":
            self.answer(200, BODY + b"!")
        elif self.path == "/busy-once":
            busy = sum(path == self.path for path, _ in self.server.seen) == 1
            self.answer(503 if busy else 200, b"{}")
        elif self.path.startswith("/limited"):
            first = sum(path == self.path for path, _ in self.server.seen) == 1
            seconds = self.path.rpartition("-")[2]
            problem = json.dumps(TooManyRequests("slower", retry_after_seconds=int(seconds)).problem()).encode()
            if first:
                self.answer(429, problem, Retry_After=seconds)
            else:
                self.answer(200, BODY if "file" in self.path else b"{}")
        elif self.path == "/events":
            text = b'id: 1\nevent: job\ndata: {"a":\ndata: 1}\n\n: keep-alive\n\nid: 2\ndata: x\n\n'
            self.answer(200, text, Content_Type="text/event-stream")
        elif self.path.startswith("/sent-to/"):
            self.answer(307, b"", Location=self.server.elsewhere + self.path.removeprefix("/sent-to"))
        elif self.path == "/round-and-round":
            self.answer(302, b"", Location=self.path)
        elif self.path == "/expires":
            late = sum(path == self.path for path, _ in self.server.seen) == 1
            self.answer(403, b"<Error/>") if late else self.answer(206 if start else 200, BODY[start:])
        elif self.path == "/refused":
            self.answer(403, b"<Error/>")
        elif self.path == "/misplaced":
            span = f"bytes 5-{len(BODY) - 1}/{len(BODY)}"
            self.answer(206, BODY[5:], Content_Range=span)
        elif self.path == "/html":
            self.answer(500, b"<html>")
        else:
            self.answer(404, json.dumps(NotFound("gone fishing").problem()).encode())


@contextlib.contextmanager
def serving(certificate=None):
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.seen, http.signed = [], []
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        http.socket, scheme = context.wrap_socket(http.socket, server_side=True), "https"
    http.url = f"{scheme}://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def server():
    with serving() as http:
        yield http


@pytest.fixture
def elsewhere(server):
    """Another host, to which the server sends who asks for /sent-to/..."""
    with serving() as http:
        server.elsewhere = http.url
        http.elsewhere = server.url
        yield http


@pytest.fixture
def transport(server):
    with Transport(f"http://127.0.0.1:{server.server_port}", "secret") as made:
        yield made


def test_problems_are_raised_as_what_the_server_raised(transport):
    with pytest.raises(NotFound, match="gone fishing"):
        transport.request("GET", "/nothing")
    with pytest.raises(MobizoError, match="500"):
        transport.request("GET", "/html")


def test_a_busy_server_is_asked_again_and_the_token_is_sent(transport, server):
    assert transport.request("GET", "/busy-once").json() == {}
    assert len(server.seen) == 2
    assert server.seen[0][1]["Authorization"] == "Bearer secret"


@pytest.fixture
def slept(monkeypatch):
    """The pauses that were made, none of them for real."""
    found = []
    monkeypatch.setattr(transport_module.time, "sleep", found.append)
    return found


@pytest.mark.parametrize("retry", [True, False])
def test_one_request_too_many_is_made_again_when_the_server_says(transport, server, slept, retry):
    assert transport.request("GET", "/limited-7", retry=retry).json() == {}
    assert len(server.seen) == 2
    assert [7 <= seconds < 8 for seconds in slept] == [True]


def test_a_server_that_asks_for_long_is_not_waited_for(transport, server, slept):
    with pytest.raises(TooManyRequests) as caught:
        transport.request("GET", "/limited-31")
    assert caught.value.extra["retry_after_seconds"] == 31
    assert slept == []
    assert len(server.seen) == 1


def test_a_download_waits_too(transport, server, slept, tmp_path):
    transport.download("/limited-file-9", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    assert [9 <= seconds < 10 for seconds in slept] == [True]


def test_what_may_be_done_once_is_not_tried_twice_for_a_busy_server(transport, server, slept):
    with pytest.raises(MobizoError):
        transport.request("GET", "/busy-once", retry=False)
    assert (len(server.seen), slept) == (1, [])


def test_a_download_is_whole_checked_and_atomic(transport, tmp_path):
    seen = []
    transport.download("/file", tmp_path / "f", size=len(BODY), sha256=SHA, progress=lambda *at: seen.append(at))
    assert (tmp_path / "f").read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY))
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("path", ["/drops", "/ignores-range"])
def test_a_dropped_download_resumes(transport, server, tmp_path, path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    transport.download(path, tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    assert server.seen[0][1]["Range"] == "bytes=100000-"
    assert server.seen[0][1]["If-Range"] == f'"{SHA}"'


@pytest.mark.parametrize("path", ["/wrong", "/longer", "/sent-to/wrong", "/sent-to/longer"])
def test_what_is_not_the_file_is_not_kept(transport, elsewhere, tmp_path, path):
    with pytest.raises(Untrusted):
        transport.download(path, tmp_path / "f", size=len(BODY), sha256=SHA)
    assert not (tmp_path / "f").exists()


def test_events(transport):
    assert list(transport.events("/events")) == [("job", "1", '{"a":\n1}'), ("message", "2", "x")]


def test_no_server_is_one_clear_error():
    with Transport("http://127.0.0.1:1", attempts=2) as transport, pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        transport.request("GET", "/")


def test_a_file_of_another_host_is_fetched_without_our_token(transport, server, elsewhere, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    (_, told), (path, asked) = server.seen[0], elsewhere.seen[0]
    assert path == "/file"
    assert told["Authorization"] == "Bearer secret"
    assert told["If-Range"] == f'"{SHA}"'
    assert "Authorization" not in asked
    assert "If-Range" not in asked
    assert asked["Range"] == "bytes=100000-"


def test_a_place_of_the_same_host_is_told_the_token(transport, server, tmp_path):
    server.elsewhere = server.url
    transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert [headers["Authorization"] for _, headers in server.seen] == ["Bearer secret"] * 2


def test_who_was_sent_away_comes_back_as_a_stranger(transport, server, elsewhere, tmp_path):
    transport.download("/sent-to/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert [path for path, _ in server.seen] == ["/sent-to/sent-to/file", "/file"]
    assert "Authorization" not in server.seen[1][1]


@pytest.mark.parametrize("path", ["/drops", "/ignores-range", "/expires"])
def test_another_host_that_fails_is_found_through_ours_again(transport, server, elsewhere, tmp_path, path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    transport.download(f"/sent-to{path}", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f").read_bytes() == BODY
    assert len(server.seen) == len(elsewhere.seen)


def test_another_host_that_refuses_for_good(server, elsewhere, tmp_path):
    with Transport(server.url, attempts=2) as transport, pytest.raises(Unreachable, match="403"):
        transport.download("/sent-to/refused", tmp_path / "f", size=len(BODY), sha256=SHA)


def test_a_part_of_another_place_is_not_joined(server, tmp_path):
    (tmp_path / "f.part").write_bytes(BODY[:100_000])
    with Transport(server.url, attempts=1) as transport, pytest.raises(Unreachable):
        transport.download("/misplaced", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert (tmp_path / "f.part").read_bytes() == BODY[:100_000]


def test_circles_are_left(transport, tmp_path):
    with pytest.raises(MobizoError, match="redirected"):
        transport.download("/round-and-round", tmp_path / "f", size=len(BODY), sha256=SHA)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_other_kinds_of_address_are_refused(transport, server, tmp_path, target):
    server.elsewhere = target
    with pytest.raises(MobizoError):
        transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
    assert not (tmp_path / "f").exists()


def test_nobody_is_sent_from_an_encrypted_place_to_one_in_clear(server, tmp_path, monkeypatch):
    certificate = loopback_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with serving(certificate) as encrypted, Transport(encrypted.url, "secret") as transport:
        encrypted.elsewhere = server.url
        with pytest.raises(Untrusted, match="not encrypted"):
            transport.download("/sent-to/file", tmp_path / "f", size=len(BODY), sha256=SHA)
        assert server.seen == []
        transport.download("/file", tmp_path / "f", size=len(BODY), sha256=SHA)


def test_each_try_is_signed_anew_as_it_is_sent(server):
    key = new_private_key()
    url = f"http://127.0.0.1:{server.server_port}"
    with Transport(url, signer=RequestSigner(key, lambda: 1_700_000_000)) as transport:
        transport.request("POST", "/a b/ü", json={"x": "é"}, params={"q": "1 2"})
        transport.request("GET", "/busy-once")
    assert len({signature.nonce for signature, _, _ in server.signed}) == len(server.signed) == 2
    for signature, body, sent in server.signed:
        signature.verify(key.public_key(), "POST", *sent.split("?"))
        assert signature.digest == hashlib.sha256(body).digest()
    assert not any("Signature" in headers for _, headers in server.seen)
