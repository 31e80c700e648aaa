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


class Relay:
    """A running relay."""

    def __init__(self, server):
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.exchanges = []
        self.break_after = None  # bytes of the next longer answer that are passed on
        self._lock = threading.Lock()

    def cut(self, length):
        """How many bytes of a body this long to pass on."""
        with self._lock:
            if self.break_after is None or length <= self.break_after:
                return length
            limit, self.break_after = self.break_after, None
            return limit

    def note(self, exchange):
        with self._lock:
            self.exchanges.append(exchange)

    def bodies(self):
        """The requests that were answered with a file's bytes."""
        return [
            exchange
            for exchange in self.exchanges
            if exchange.method == "GET" and "/resolve/" in exchange.path and exchange.body_bytes
        ]

    def take(self):
        """The exchanges since the last time."""
        with self._lock:
            exchanges, self.exchanges = self.exchanges, []
        return exchanges


def _handler(target, relay):
    place = urlsplit(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args): ...

        def _relay(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            link = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
            # As it came, with the client's own Host.
            link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                link.putheader(name, value)
            link.endheaders(body)
            answer = link.getresponse()
            data = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP and (name.lower() != "content-length" or self.command == "HEAD"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            length = relay.cut(len(data))
            answer_headers = {name.lower(): value for name, value in answer.getheaders()}
            request_headers = {name.lower(): value for name, value in self.headers.items()}
            # Before the answer: whoever has that may look at once.
            relay.note(Exchange(self.command, self.path, request_headers, answer.status, answer_headers, length))
            self.end_headers()
            self.wfile.write(data[:length])
            link.close()
            self.close_connection = length < len(data) or self.close_connection

        do_GET = do_HEAD = do_POST = _relay  # noqa: N815

    return Handler


@contextlib.contextmanager
def relayed(target):
    """A relay to the server at a URL, on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.daemon_threads = True
    relay = Relay(server)
    server.RequestHandlerClass = _handler(target, relay)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
