"""`python -m bench.reader`: downloads files over many connections at once, and does as little else as it can.

A process of its own, so that what is measured is the server. Takes a JSON plan as its first line of input, says
`ready`, and begins at the next line; prints begin and end on the machine's monotonic clock, and the bytes read. Every
download is a list of files, fetched in turn on one connection; a large one is two requests, as one that broke off
half-way and went on. Speaks just the HTTP it needs.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

BUFFER_BYTES = 256 << 10
LARGE_BYTES = 1 << 20  # from here on a file is two requests


@dataclass
class Download:
    """One connection: requests still to send, and what is still to come of the present answer."""

    link: socket.socket
    requests: list[bytes]
    head: bytes = b""
    left: int | None = None
    read: int = field(default=0)

    def ask(self) -> None:
        """Sends the next request."""
        self.link.setblocking(True)
        self.link.sendall(self.requests.pop(0))
        self.link.setblocking(False)
        self.head, self.left = b"", None

    def take(self, piece: memoryview) -> bool:
        """Takes what arrived; True once the whole file did."""
        if self.left is None:
            self.head += bytes(piece)
            head, end, body = self.head.partition(b"\r\n\r\n")
            if not end:
                return False
            if head.split(b"\r\n")[0].split(b" ")[1] not in (b"200", b"206"):
                raise RuntimeError(head.decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self.left = int(length.split(b":")[1]) - len(body)
            self.read += len(body)
        else:
            self.left -= len(piece)
            self.read += len(piece)
        if self.left == 0 and self.requests:
            self.ask()
        return self.left == 0


def _requests(path: str, size: int, headers: str) -> list[bytes]:
    spans = [f"Range: bytes={span}\r\n" for span in (f"0-{size // 2 - 1}", f"{size // 2}-")]
    return [
        f"GET {path} HTTP/1.1\r\nHost: bench\r\n{headers}{span}\r\n".encode()
        for span in (spans if size >= LARGE_BYTES else [""])
    ]


def read_all(plan: dict[str, Any]) -> dict[str, float]:
    """Fetches `plan["downloads"]`, lists of (path, bytes), all at once."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    total = 0
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for files in plan["downloads"]:
            link = socket.create_connection((plan["host"], plan["port"]))
            requests = [request for path, size in files for request in _requests(path, size, plan["headers"])]
            download = Download(link, requests)
            download.ask()
            selector.register(link, selectors.EVENT_READ, download)
        while selector.get_map():
            for key, _ in selector.select():
                download = key.data
                try:
                    count = download.link.recv_into(buffer)
                except BlockingIOError:
                    continue
                if count == 0:
                    raise RuntimeError(f"the server ended a download after {download.read} bytes")
                if download.take(buffer[:count]):
                    selector.unregister(download.link)
                    download.link.close()
                    total += download.read
    return {"began": began, "ended": time.monotonic(), "bytes": total}


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(read_all(given)), flush=True)
