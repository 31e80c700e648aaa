"""Starts and stops the scorer's process, exchanges frames with it over a private socket, and notices its death."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from server.inference.frames import HEADER_BYTES, body_length, pack, unpack
from server.settings import Settings
from server.tasks.parent_death_signal import bound_to_parent

STOP_SECONDS = 5.0
Inbox = asyncio.Queue[dict[str, Any] | None]  # None: the scorer is gone
_log = structlog.get_logger()


class Link:
    """One scorer's process while it lives. Belongs to one event loop."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hear: Callable[[dict[str, Any]], None],
    ) -> None:
        """hear: called with messages that belong to no request."""
        self._process, self._reader, self._writer, self._hear = process, reader, writer, hear
        self._inboxes: dict[int, Inbox] = {}
        self._closing = False
        self.ended = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, settings: Settings, hear: Callable[[dict[str, Any]], None]) -> Link:
        """Starts a process that the kernel kills if this one dies."""
        server_end, scorer_end = socket.socketpair()
        with scorer_end:
            # A session of its own: Ctrl-C in a terminal reaches the server, which stops it in order.
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent([sys.executable, "-m", "server.inference", str(scorer_end.fileno())]),
                env=os.environ | settings.environment(),
                stdin=DEVNULL,
                stdout=DEVNULL,
                pass_fds=[scorer_end.fileno()],
                start_new_session=True,
            )
        server_end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=server_end)
        _log.info("scorer-started", pid=process.pid)
        return cls(process, reader, writer, hear)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def open(self, number: int) -> Inbox:
        """Returns the queue of messages about request `number`; None in it means that the scorer is gone."""
        inbox: Inbox = asyncio.Queue()
        if self.ended:
            inbox.put_nowait(None)
        self._inboxes[number] = inbox
        return inbox

    def shut(self, number: int) -> None:
        """Drops further messages about request `number`."""
        self._inboxes.pop(number, None)

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message to the scorer. If the scorer is gone, the queues of its requests report that."""
        with suppress(ConnectionError):
            self._writer.write(pack(message))
            await self._writer.drain()

    async def _listen(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(HEADER_BYTES)
                message = unpack(await self._reader.readexactly(body_length(header)))
                if "id" not in message:
                    self._hear(message)
                elif (inbox := self._inboxes.get(message["id"])) is not None:
                    inbox.put_nowait(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended = True
            for inbox in self._inboxes.values():
                inbox.put_nowait(None)
        if not self._closing:
            _log.error("scorer-died", exit_code=await self._process.wait())
        self._writer.close()

    async def close(self) -> None:
        """Stops the process."""
        self._closing = True
        self._writer.close()  # it ends when its socket does, at once
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening
