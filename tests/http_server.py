"""A small HTTP server on a free port of the loopback interface, beside a test."""

import contextlib
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Has `get`, for HEAD too, and `post`; logs nothing, and answers in one call. `_` in a header's name is `-`."""

    def do_GET(self):
        self.get()

    do_HEAD = do_GET  # noqa: N815  # http.server's names

    def do_POST(self):
        self.post()

    def log_message(self, *args):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content_Length": len(content)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def http_server(handler, certificate=None, port=0, **attributes):
    """A running server, with its `url` and these attributes. certificate: paths of one and its key, for https."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_port}"
    vars(server).update(attributes)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
