"""A real HTTP receiver of webhooks on the loopback interface."""

import contextlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standardwebhooks.webhooks import Webhook as Verifier


class Receiver:
    """Keeps the messages that arrived, as (path, headers, body), and answers with the next status, at the end 204."""

    def __init__(self, scheme, port):
        self.url, self.port = f"{scheme}://127.0.0.1:{port}/hook", port
        self.messages, self.statuses, self.open = [], [], threading.Event()
        self.open.set()

    def ids(self):
        return [headers["webhook-id"] for _, headers, _ in self.messages]

    def verified(self, secret):
        """The content of each message whose signature an independent implementation accepts."""
        return [Verifier(secret).verify(body, headers) for _, headers, body in self.messages]

    def take(self, handler):
        body = handler.rfile.read(int(handler.headers["content-length"]))
        self.messages.append((handler.path, {name.lower(): value for name, value in handler.headers.items()}, body))
        self.open.wait(60)
        handler.send_response(self.statuses.pop(0) if self.statuses else 204)
        handler.send_header("Location", f"{self.url}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()


@contextlib.contextmanager
def receiving(certificate=None):
    """A receiver; certificate: paths of a certificate and its key, for https."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            with contextlib.suppress(ConnectionError):
                receiver.take(self)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a handshake that the client breaks off
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver = Receiver("http" if certificate is None else "https", server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.open.set()
        server.shutdown()
        server.server_close()
        thread.join()


def create(actor, url, *events):
    """A webhook of these events; (id, secret)."""
    response = actor.post("/v1/webhooks", json={"url": url, "events": events})
    assert response.status_code == 201, response.text
    grant = response.json()
    return grant["view"]["id"], grant["secret"]


def deliveries(actor, webhook):
    """The deliveries of a webhook, oldest first."""
    return actor.get(f"/v1/webhooks/{webhook}/deliveries").json()["items"][::-1]


def types(messages):
    return [json.loads(body)["type"] for _, _, body in messages]
