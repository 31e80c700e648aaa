"""`python -m bench.server.attack`: strangers without a token who hold connections and send bodies.

Reads its orders as the first line of standard input, attacks until standard input ends, and prints what it did as JSON.
Each stranger connects again a second after it was disconnected.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pydantic import BaseModel

PIECE = b" " * (256 << 10)
HALF = b"POST /v1/jobs HTTP/1.1\r\nHost: strangers\r\nContent-Type: application/js"
PAUSE = 1.0  # seconds until a stranger that was refused connects again


class Attack(BaseModel):
    """The orders. addresses: of the senders, in turn; idle, half, bodies: connections of each kind at the same time.

    json_bytes, upload_bytes: sizes of the bodies, half of which go to a route of each kind.
    """

    port: int
    addresses: list[str]
    idle: int
    half: int
    bodies: int
    json_bytes: int
    upload_bytes: int


@dataclass
class Strangers:
    """All strangers of one attack. did: connections and bodies by kind."""

    attack: Attack
    did: Counter[str] = field(default_factory=Counter)
    _numbers: Any = field(default_factory=count)

    async def run(self) -> None:
        """Attacks until it is cancelled."""
        kinds = {"idle": self.attack.idle, "half": self.attack.half, "bodies": self.attack.bodies}
        async with asyncio.TaskGroup() as group:
            for kind, number in kinds.items():
                for place in range(number):
                    group.create_task(self._stay(kind, place))

    async def _stay(self, kind: str, place: int) -> None:
        """One stranger, who connects again and again."""
        loop = asyncio.get_running_loop()
        address = self.attack.addresses[next(self._numbers) % len(self.attack.addresses)]
        while True:
            with contextlib.suppress(OSError), socket.socket() as link:
                link.setblocking(False)
                link.bind((address, 0))
                await loop.sock_connect(link, ("127.0.0.1", self.attack.port))
                self.did[f"{kind} connections"] += 1
                if kind == "bodies":
                    await self._send_body(link, place)
                elif kind == "half":
                    await loop.sock_sendall(link, HALF)
                while await loop.sock_recv(link, 1 << 16):
                    pass
            await asyncio.sleep(PAUSE)

    async def _send_body(self, link: socket.socket, place: int) -> None:
        loop, uploads = asyncio.get_running_loop(), place % 2
        path = "PUT /v1/leases/x/adapter" if uploads else "POST /v1/jobs"
        kind = "application/octet-stream" if uploads else "application/json"
        left = self.attack.upload_bytes if uploads else self.attack.json_bytes
        head = f"{path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {left}\r\n\r\n"
        await loop.sock_sendall(link, head.encode())
        while left:
            piece = memoryview(PIECE)[: min(left, len(PIECE))]
            await loop.sock_sendall(link, piece)
            left -= len(piece)
            self.did["body bytes"] += len(piece)
        self.did["whole bodies"] += 1


async def main() -> None:
    """Reads the orders and attacks until standard input ends."""
    loop = asyncio.get_running_loop()
    strangers = Strangers(Attack.model_validate_json(sys.stdin.readline()))
    attack = asyncio.create_task(strangers.run())
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    attack.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attack
    print(json.dumps(strangers.did))


if __name__ == "__main__":
    asyncio.run(main())
