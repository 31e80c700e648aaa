"""Serves metrics on a separate loopback port without a token, for a Prometheus on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from server.operations.metrics.exposition import Exposition
from shared.errors import Unavailable

LOOPBACK = "127.0.0.1"
_log = structlog.get_logger()


@contextmanager
def metrics_listener(exposition: Exposition, port: int | None) -> Iterator[int | None]:
    """Serves GET /metrics within the context and yields its port, or None if `port` is None. Raises Unavailable."""
    if port is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Serves one scrape."""
            if self.path != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            text = exposition.text()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            """Does not log scrapes."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise Unavailable(f"cannot listen on {LOOPBACK} port {port} for metrics: {error.strerror or error}") from error
    with server:
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        _log.info("metrics-listening", port=server.server_port)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
