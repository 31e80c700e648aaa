"""The HTTP server's limits of time and number, held by clients that do not keep to them."""

import asyncio
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from device_agent.serving import http

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def count(request):
    return PlainTextResponse(f"{len(await request.body())}.")


async def endless(request):
    async def pieces():
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0)

    return StreamingResponse(pieces())


APP = Starlette(routes=[Route("/", count, methods=["POST"]), Route("/endless", endless)])


@pytest.fixture
def short(monkeypatch):
    """Deadlines of half a second."""
    for name in ("HEAD_SECONDS", "IDLE_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(http, name, 0.5)


def run_with_server(talk):
    """Returns what `talk` returns, which gets a function that opens a connection."""

    async def run():
        listening, writers = http.listen("127.0.0.1", 0), []
        address, server = listening.getsockname(), http.http_server(APP)
        serving = asyncio.create_task(server.serve([listening]))

        async def connect():
            reader, writer = await asyncio.open_connection(*address)
            writers.append(writer)
            return reader, writer

        try:
            return await asyncio.wait_for(talk(connect), 60)
        finally:
            for writer in writers:
                writer.close()
            server.should_exit = True
            await serving

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", b""),
        (b"POST / HTTP/1.1\r\nhost:", b""),
        (HEAD + b"content-length: 2\r\n\r\nab", b"2."),
        (HEAD + b"content-length: 2\r\n\r\nab" + HEAD, b"2."),
        (b"POST /none HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab", b"Not Found"),
    ],
)
def test_a_connection_whose_next_request_does_not_arrive_is_closed(short, data, answer):
    async def talk(connect):
        reader, writer = await connect()
        writer.write(data)
        return await reader.read()

    assert run_with_server(talk).partition(b"\r\n\r\n")[2] == answer


def test_a_request_in_progress_has_no_deadline_of_its_head(short):
    async def talk(connect):
        reader, writer = await connect()
        writer.write(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\na")
        await asyncio.sleep(3 * http.HEAD_SECONDS)
        writer.write(b"b")
        return await reader.read()

    assert run_with_server(talk).endswith(b"2.")


def test_a_client_that_does_not_read_is_disconnected(short):
    async def talk(connect):
        reader, writer = await connect()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        await asyncio.sleep(3 * http.UNREAD_SECONDS)
        writer.transport.resume_reading()
        while await reader.read(1 << 20):
            pass  # what was on its way; an open connection would go on

    run_with_server(talk)


def test_connections_beyond_the_limit_get_503_and_one_serves_several_requests(monkeypatch):
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)

    async def talk(connect):
        reader, writer = await connect()
        for size in (1, 3):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % size + b"x" * size)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readuntil(b".") == b"%d." % size
        other, writer = await connect()
        writer.write(HEAD + b"content-length: 0\r\n\r\n")
        return await other.read()

    assert run_with_server(talk).startswith(b"HTTP/1.1 503 ")
