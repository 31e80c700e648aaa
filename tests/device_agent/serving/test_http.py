"""The HTTP server's limits of time and number, held by clients that do not keep to them."""

import asyncio
import json

import pytest

from device_agent.serving.http import HttpServer, Limits, Response

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def echo(body):
    return Response.json({"size": len(body)})


def run_with_server(talk, **limits):
    """Returns what `talk` returns, which gets a function that opens a connection."""

    async def run():
        server = HttpServer(lambda request: echo, Limits(**limits))
        port, writers = await server.start("127.0.0.1", 0), []

        async def connect():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return reader, writer

        try:
            return await talk(connect)
        finally:
            for writer in writers:
                writer.close()
            await server.stop(1)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", b""),
        (b"POST / HTTP/1.1\r\nhost:", b""),
        (HEAD + b"content-length: 9\r\n\r\nab", b"HTTP/1.1 408 "),
        (HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nab", b"HTTP/1.1 200 "),
    ],
)
def test_a_connection_that_does_not_go_on_is_closed(data, answer):
    async def talk(connect):
        reader, writer = await connect()
        writer.write(data)
        return await reader.read()

    response = run_with_server(talk, header_seconds=0.2, body_seconds=0.2)
    assert response.startswith(answer)
    assert bool(response) == bool(answer)


def test_connections_beyond_the_limit_get_503_and_one_serves_several_requests():
    async def talk(connect):
        reader, writer = await connect()
        sizes = []
        for size in (1, 3):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % size + b"x" * size)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            sizes.append(json.loads(await reader.readuntil(b"}"))["size"])
        other, _ = await connect()
        return sizes, await other.read()

    sizes, refusal = run_with_server(talk, connections=1)
    assert sizes == [1, 3]
    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
