"""`python -m server.inference FD`: the scorer, a process beside the server that receives requests over the socket FD.

It ends when the server closes the socket. Settings come from the environment, as for workers.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.inference.frames import HEADER_BYTES, body_length, pack, unpack
from server.inference.model import use_threads
from server.inference.model_cache import ModelCache
from server.inference.scheduler import Scheduler
from server.logs import configure_logs
from server.settings import Settings
from server.storage.opening import open_artifacts

LIKELIER_VICTIM = "500"  # where memory runs out, the kernel ends this process before the server, which starts another


def main(descriptor: int) -> None:
    """Processes requests until the server closes the socket."""
    configure_logs()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(LIKELIER_VICTIM, encoding="ascii")
    settings = Settings()
    use_threads(settings.scorer_threads)
    link = socket.socket(fileno=descriptor)
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, inbox), daemon=True).start()
    model_cache = ModelCache(open_artifacts(settings), settings.scorer_base_bytes, settings.scorer_adapter_bytes)
    scheduler = Scheduler(
        model_cache,
        settings.scorer_batch_tokens,
        settings.scorer_cache_bytes,
        lambda message: link.sendall(pack(message)),
    )
    while True:
        if scheduler.idle:
            scheduler.receive(inbox.get())
        with suppress(queue.Empty):
            while True:
                scheduler.receive(inbox.get_nowait())
        scheduler.step()


def _listen(link: socket.socket, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Reads the server's messages. Ends the process when the server closes the socket."""
    with link.makefile("rb") as stream:
        while len(header := stream.read(HEADER_BYTES)) == HEADER_BYTES:
            inbox.put(unpack(stream.read(body_length(header))))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
