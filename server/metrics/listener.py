"""Metrics on a port of their own, for a Prometheus on this machine: reached from nowhere else, so without a token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from server.metrics.exposition import Exposition
from shared.errors import Unavailable

LOOPBACK = "127.0.0.1"
_log = structlog.get_logger()


@contextmanager
def metrics_listener(exposition: Exposition, port: int | None) -> Iterator[int | None]:
    """Answers GET /metrics while the context lasts; yields its port, None if `port` is. Raises Unavailable."""
    if port is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """One scrape."""
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
            """Every few seconds the same is no news."""

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
