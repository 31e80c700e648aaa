"""A request whose transaction met another's is done again from its beginning; the one place where requests are.

FastAPI ends the transactions of a request (dependencies of scope "function") when it leaves a stack in
the request's scope, after it has an answer: each try gets a stack of its own, so that a commit that fails is seen too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count

import structlog
from fastapi import Request, Response

from server.database.failures import TRIES, Collision, pause_seconds

STACK = "fastapi_function_astack"
_log = structlog.get_logger()


async def with_retries(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """The answer to a request that was read before. Raises Collision if every try met another transaction.

    A PUT is tried once: its body is a stream, which is gone by then.
    """
    most = 1 if request.method == "PUT" else TRIES
    outer = request.scope[STACK]
    try:
        for tries in count(1):
            try:
                async with AsyncExitStack() as stack:
                    request.scope[STACK] = stack
                    return await answer(request)
            except Collision as error:
                if tries >= most:
                    raise
                _log.info("collision", tries=tries, cause=str(error.__cause__).partition("\n")[0])
            await asyncio.sleep(pause_seconds(tries))
        raise AssertionError("unreachable")
    finally:
        request.scope[STACK] = outer
