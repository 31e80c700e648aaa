"""Privacy accounting for requests: exact answers are computed in a child process that ends with its request.

Finding the noise of a private run takes seconds of processor time, and hostile settings take minutes. Tenants take
turns at it. In a transaction the answers are then known, or the faster bound is used.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import Request

from server.tasks.child_process import ONE_THREAD
from server.web.routes import HANDLERS
from server.web.state import AppState
from server.web.streams import cancelled_on_disconnect
from server.web.tenant_turns import Places
from shared.errors import Unavailable, from_problem
from shared.federation.accounting import AccountingRequest, NotAccounted, remember

ACCOUNTANTS = Places("accounting", 2)  # child processes
MAX_SECONDS = 60  # that a request waits for its turn and its answers
Result = TypeVar("Result")


@asynccontextmanager
async def accountant() -> AsyncIterator[Process]:
    """Starts a child process that answers accounting requests; it is killed at the end of the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shared.federation.accounting"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=ONE_THREAD | os.environ,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def learn(process: Process, request: AccountingRequest) -> None:
    """Has an answer computed and remembers it. Raises what the request is refused with, Unavailable at a limit."""
    questions, answers = process.stdin, process.stdout
    if questions is None or answers is None:
        raise RuntimeError("the child process has no pipes")
    questions.write(request.model_dump_json().encode() + b"\n")
    line = await answers.readline()
    if not line:
        raise Unavailable("privacy accounting of this request takes too much time or memory; use fewer steps")
    answer = json.loads(line)
    if "problem" in answer:
        raise from_problem(answer["problem"])
    remember(request.key, answer["answer"])


async def accounted(connection: Request, tenant: str, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, which a thread repeats until every answer that it needs is known.

    work: raises NotAccounted for the next answer. If the client disconnects, the computation ends. Raises Unavailable
    after MAX_SECONDS, TooManyRequests, and what `work` raises.
    """
    state: AppState = connection.app.state.mobizo
    try:
        return await state.get(HANDLERS.make).run(tenant, work)
    except NotAccounted as missing:
        first = missing.request
    return await cancelled_on_disconnect(connection, _learn_all(state, tenant, work, first))


async def _learn_all(state: AppState, tenant: str, work: Callable[[], Result], request: AccountingRequest) -> Result:
    try:
        async with asyncio.timeout(MAX_SECONDS), state.get(ACCOUNTANTS.make).turn(tenant), accountant() as process:
            while True:
                await learn(process, request)
                try:
                    return await state.get(HANDLERS.make).run(tenant, work)
                except NotAccounted as missing:
                    request = missing.request
    except TimeoutError as error:
        raise Unavailable("privacy accounting takes too long at the moment; try again later") from error
