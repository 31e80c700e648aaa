"""That the server is about to stop, told to all who hold a request up. Knows no HTTP."""

from __future__ import annotations

import asyncio


class Closing:
    """Not begun at first; once begun it stays so. Belongs to the thread that runs the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the server stops."""
        return self._event.is_set()

    def begin(self) -> None:
        """Ends every `pause` now."""
        self._event.set()

    async def pause(self, seconds: float) -> bool:
        """Waits that long, or until the server stops. True if it does."""
        if not self.begun:
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                pass
        return self.begun
