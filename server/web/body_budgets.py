"""Bounds on the bytes of request bodies that a process holds: in memory, and in the staging files of uploads.

A tenant may hold as much as is then left free, and a token half of what its tenant may still take: alone, half of all
and a quarter. So whatever others hold, every tenant finds room, and every token of it. Requests without a valid token
count as one more tenant, and by address in place of the token. Bytes count as they arrive, so that an announced length
reserves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from server.settings import MEBIBYTE
from server.storage.garbage_collection import begin_removal, delete_files, end_removal
from server.storage.store import StagingFile
from server.web.bodies import pieces_of
from server.web.state import AppState, address_of, place_of
from server.web.tenant_turns import Places
from shared.errors import MobizoError, TooManyRequests, Unavailable

Take = Callable[[int], None]
MEMORY_BYTES = 64 * MEBIBYTE
UPLOADS = 16  # of the largest size, whose staging files may exist at once
UPLOADERS = Places("uploading", 8)  # threads that check and store uploads, beside those of other requests


class ByteBudget:
    """The bytes of bodies that one process holds. Use it only in the thread of the event loop."""

    def __init__(self, name: str, total: int) -> None:
        """name: of the bound, in the error."""
        self._name, self._total = name, total
        self._held: Counter[tuple[str, ...]] = Counter()

    @property
    def held(self) -> int:
        """Returns the bytes that are held now."""
        return self._held[()]

    @contextmanager
    def share(self, tenant: str, sender: str) -> Iterator[Take]:
        """Yields a function that takes bytes for one request, until the end of the context.

        It raises TooManyRequests at a bound.
        """
        keys = (), (tenant,), (tenant, sender)
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            of_all, of_tenant, of_token = (self._held[key] + size for key in keys)
            room = self._total - of_all - of_tenant  # that the tenant could still take
            if size and 2 * of_token > room:
                raise TooManyRequests(
                    f"the requests in progress of the tenant hold {self._held[tenant,]} bytes of bodies, and those of "
                    f"the token {self._held[tenant, sender]}, of {self._total} for all; send fewer at once",
                    limit=self._name,
                    retry_after_seconds=1,
                )
            taken += size
            self._held.update(dict.fromkeys(keys, size))

        try:
            yield take
        finally:
            self._held.subtract(dict.fromkeys(keys, taken))
            for key in keys:
                if not self._held[key]:
                    del self._held[key]


def make_body_memory(state: AppState) -> ByteBudget:
    """Makes the budget of bodies in memory, for `AppState.get`."""
    return ByteBudget("body-memory", MEMORY_BYTES)


def make_upload_space(state: AppState) -> ByteBudget:
    """Makes the budget of the staging files of uploads, for `AppState.get`."""
    return ByteBudget("uploads", UPLOADS * state.settings.upload_bytes)


def sender_of(request: Request) -> tuple[str, str]:
    """Returns the tenant and the token that an admitted request counts for."""
    principal = getattr(request.state, "principal", None)
    if principal is None:
        return "", place_of(address_of(request))
    return principal.tenant, principal.token_id


@asynccontextmanager
async def staged_body(request: Request, limit: int) -> AsyncIterator[StagingFile]:
    """Writes the whole body to a staging file, hashed as it arrives; the file is removed at the end.

    Raises TooLarge, BadRequest if the body breaks off, TooManyRequests, or StorageFull.
    """
    state: AppState = request.app.state.mobizo
    with state.get(make_upload_space).share(*sender_of(request)) as take:
        async with contextmanager_in_threadpool(state.artifacts.staging_file()) as staged:
            async for piece in pieces_of(request, limit):
                take(len(piece))
                await run_in_threadpool(staged.write, piece)
            yield staged


@asynccontextmanager
async def stored(state: AppState, tenant: str, staged: StagingFile) -> AsyncIterator[None]:
    """Moves a staging file into the store. If the context is refused, the file is removed unless it is referenced.

    Raises StorageFull.
    """
    await state.get(UPLOADERS.make).run(tenant, state.artifacts.adopt, staged.path, staged.sha256)
    try:
        yield
    except Unavailable:
        raise  # the same upload may be sent again
    except MobizoError:
        await remove_unreferenced(state, tenant, staged.sha256)
        raise


async def remove_unreferenced(state: AppState, tenant: str, sha256: str | None) -> None:
    """Removes a file, for example one that another upload replaced, unless something references it.

    If that is refused or fails, garbage collection removes the file later.
    """
    if sha256 is None:
        return
    with suppress(MobizoError):
        removal = await state.write_queue.run(begin_removal, state.database, [sha256])
        await state.get(UPLOADERS.make).run(tenant, delete_files, state.artifacts, removal)
        await state.write_queue.run(end_removal, state.database, removal)
