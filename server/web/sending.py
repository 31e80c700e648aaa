"""The body of a download: part of a stored file, sent by the system itself where that can be had, else in pieces.

A whole file goes in pieces, which are hashed on the way, until its hash was found right since it last changed.
"""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO

from fastapi import Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.storage.store import ArtifactStore
from server.web.zero_copy import EXTENSION

SMALL_BYTES = 64 << 10  # up to which it is not worth the system's help
SPAN_BYTES = 1 << 20  # sent at once: others wait that long for their turn
MEDIA_TYPE = "application/octet-stream"


class FileSpan(Response):
    """Bytes `start` to `end` (exclusive) of a stored file; the headers say how many."""

    media_type = MEDIA_TYPE

    def __init__(
        self, artifacts: ArtifactStore, sha256: str, span: tuple[int, int], status: int, headers: dict[str, str]
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        self._artifacts, self._sha256, self._span = artifacts, sha256, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        start, end = self._span
        file = None
        if EXTENSION in scope.get("extensions", {}):
            file = self._artifacts.opened(self._sha256, start, end)
        if file is None:
            pieces = self._artifacts.stream(self._sha256, start, end)
            answer = StreamingResponse(pieces, self.status_code, media_type=MEDIA_TYPE)
            answer.raw_headers = self.raw_headers
            await answer(scope, receive, send)
            return
        with file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if end - start <= SMALL_BYTES:
                await _warm(file, start, end - start)
                await send({"type": "http.response.body", "body": os.pread(file.fileno(), end - start, start)})
                return
            try:
                for offset in range(start, end, SPAN_BYTES):
                    count = min(SPAN_BYTES, end - offset)
                    await _warm(file, offset, count)
                    span = {"file": file, "offset": offset, "count": count, "more_body": offset + count < end}
                    await send({"type": EXTENSION, **span})
            except ConnectionError:
                return  # nobody is there any more


async def _warm(file: BinaryIO, offset: int, count: int) -> None:
    """Has the system read from its disk what it does not hold in memory: sending waits for it, and all others with it.

    Looks at both ends only. What is missing between them is read while it is sent.
    """
    for place in (offset, offset + count - 1):
        try:
            held = os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
        except OSError:
            held = 0
        if not held:
            await asyncio.to_thread(os.pread, file.fileno(), count, offset)
            return
