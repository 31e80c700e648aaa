"""A real HTTP receiver of webhooks on the loopback interface."""

import contextlib
import json
import threading

from standardwebhooks.webhooks import Webhook as Verifier

from tests.http_server import Handler, http_server


class Receiver:
    """Keeps the messages that arrived, as (path, headers, body), and answers with the next status, at the end 204."""

    url, port = "", 0

    def __init__(self):
        self.messages, self.statuses, self.open = [], [], threading.Event()
        self.open.set()

    def ids(self):
        return [headers["webhook-id"] for _, headers, _ in self.messages]

    def verified(self, secret):
        """The content of each message whose signature an independent implementation accepts."""
        return [Verifier(secret).verify(body, headers) for _, headers, body in self.messages]

    def take(self, handler):
        body = handler.body()
        self.messages.append((handler.path, {name.lower(): value for name, value in handler.headers.items()}, body))
        self.open.wait(60)
        handler.answer(self.statuses.pop(0) if self.statuses else 204, Location=f"{self.url}/elsewhere")


@contextlib.contextmanager
def receiving(certificate=None):
    """A receiver; certificate: paths of a certificate and its key, for https."""
    receiver = Receiver()

    class Take(Handler):
        def post(self):
            with contextlib.suppress(ConnectionError):
                receiver.take(self)

    # A client may break a handshake off.
    with http_server(Take, certificate, handle_error=lambda *_: None) as server:
        receiver.url, receiver.port = f"{server.url}/hook", server.server_port
        try:
            yield receiver
        finally:
            receiver.open.set()


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
