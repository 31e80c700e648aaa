"""The signal that ends long-lived requests when the server stops."""

from __future__ import annotations

import asyncio


class Shutdown:
    """A one-way flag. Use it only in the thread of the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the server is stopping."""
        return self._event.is_set()

    def begin(self) -> None:
        """Ends every `pause` now."""
        self._event.set()

    async def pause(self, seconds: float) -> bool:
        """Waits for `seconds` or until the server stops. Returns whether it is stopping."""
        if not self.begun:
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                pass
        return self.begun
