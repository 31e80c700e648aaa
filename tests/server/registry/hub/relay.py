"""A relay between a client and a server that notes every request, and can break an answer off in its midst."""

import contextlib
import http.client
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP = ("connection", "keep-alive", "transfer-encoding", "date", "server")


@dataclass(frozen=True)
class Exchange:
    """A request and what became of it."""

    method: str
    path: str
    headers: dict  # names in lower case
    status: int
    answer_headers: dict
    body_bytes: int  # bytes of body


class Relay(ThreadingHTTPServer):
    """A running relay."""

    daemon_threads = True

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url, self.target = f"http://127.0.0.1:{self.server_address[1]}", urlsplit(target).netloc
        self.exchanges = []
        self.break_after = None  # bytes of the next longer answer that are passed on

    def bodies(self):
        """The requests that were answered with a file's bytes."""
        return [
            exchange
            for exchange in self.exchanges
            if exchange.method == "GET" and "/resolve/" in exchange.path and exchange.body_bytes
        ]

    def take(self):
        """The exchanges since the last time."""
        exchanges, self.exchanges = self.exchanges, []
        return exchanges


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args): ...

    def _relay(self):
        relay, sent = self.server, {name.lower(): value for name, value in self.headers.items()}
        link = http.client.HTTPConnection(relay.target, timeout=60)
        body = self.rfile.read(int(sent.get("content-length", 0))) or None
        link.request(self.command, self.path, body, self.headers)
        answer = link.getresponse()
        data, answer_headers = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        length = len(data)
        if relay.break_after is not None and length > relay.break_after:
            length, relay.break_after = relay.break_after, None
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in (*HOP, "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer_headers.get("content-length", str(len(data))))
        # Before the answer: whoever has that may look at once.
        relay.exchanges.append(Exchange(self.command, self.path, sent, answer.status, answer_headers, length))
        self.end_headers()
        self.wfile.write(data[:length])
        link.close()
        self.close_connection = length < len(data) or self.close_connection

    do_GET = do_HEAD = do_POST = _relay  # noqa: N815


@contextlib.contextmanager
def relayed(target):
    """A relay to the server at a URL, on a free port."""
    with Relay(target) as relay:
        thread = threading.Thread(target=relay.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.shutdown()
            thread.join()
