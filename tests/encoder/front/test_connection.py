"""Connections that say half a request, or none: each has a time, and all together a number."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import pytest

from tests.fakes.encoder_peer import until
from tests.fakes.front import Fronted, fronted

WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHo"


async def connected(parts: Fronted) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", parts.front.port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10.0)
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(int(length.partition(b":")[2]))


@pytest.mark.parametrize("after", [b"", WHOLE])
@pytest.mark.parametrize("drips", [False, True])
async def test_a_head_that_does_not_end_is_cut_off(tiny_model_dir: Path, after: bytes, drips: bool) -> None:
    async with fronted(tiny_model_dir, head_timeout_s=0.3) as parts:
        reader, writer = await connected(parts)
        if after:
            writer.write(after)
            assert (await answer(reader))[0] == 200
            # Nothing said is no head that takes too long.
            await asyncio.sleep(0.4)
        writer.write(HALF)
        for _ in range(5 * drips):
            await asyncio.sleep(0.04)
            writer.write(b"s")
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "head_timeout")
        assert "front.head_timeout_s" in json.loads(body)["error"]["message"]
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()


async def test_a_head_in_time_and_a_long_request_are_not_cut_off(tiny_model_dir: Path) -> None:
    async with fronted(tiny_model_dir, head_timeout_s=0.3) as parts:
        reader, writer = await connected(parts)
        for _ in range(2):
            writer.write(WHOLE[:20])
            await asyncio.sleep(0.1)
            writer.write(WHOLE[20:])
            assert (await answer(reader))[0] == 200
        # The body may take longer than a head.
        writer.write(
            b"POST /v1/encode HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n"
        )
        for byte in b"{ }":
            await asyncio.sleep(0.2)
            writer.write(bytes([byte]))
        assert (await answer(reader))[0] == 400
        writer.close()


@pytest.mark.parametrize("words", [HALF, b""])
async def test_connections_without_a_request_are_bounded(tiny_model_dir: Path, words: bytes) -> None:
    """Those that are in the middle of one stay, and a newcomer is served."""
    async with fronted(tiny_model_dir, max_idle_connections=8) as parts:
        busy_reader, busy = await connected(parts)
        busy.write(
            b"POST /v1/encode HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{"
        )
        await until(lambda: parts.front._front.admission.num_inflight == 1)
        crowd = [socket.create_connection(("127.0.0.1", parts.front.port)) for _ in range(40)]
        for connection in crowd:
            connection.setblocking(False)
            connection.send(words)

        def num_closed() -> int:
            closed = 0
            for connection in crowd:
                with contextlib.suppress(BlockingIOError):
                    try:
                        closed += connection.recv(1, socket.MSG_PEEK) == b""
                    except ConnectionResetError:
                        closed += 1
            return closed

        await until(lambda: num_closed() >= 32)
        assert num_closed() <= 33
        async with parts.http.get("/v1/models") as response:
            assert response.status == 200
        busy.write(b"}")
        assert (await answer(busy_reader))[0] == 400
        busy.close()
        for connection in crowd:
            connection.close()
