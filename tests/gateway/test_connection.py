"""Connections that say half a request, none, or no TLS: each has a time, and all together a number."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import subprocess

import pytest
import uvloop

from epd.gateway.tls import Tls
from tests.fakes.gateway import Stack, running_gateway

WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHo"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", str(files[1]), "-out", str(files[0]), "-days", "2", "-subj", "/CN=localhost"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return Tls(*files)


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def connected(stack: Stack, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]), ssl=context)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10.0)).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 5.0) == b""
    except (ConnectionError, ssl.SSLError):
        return True


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("after", [b"", WHOLE])
async def test_a_head_that_does_not_end_is_cut_off(tls: Tls, safe: bool, after: bytes) -> None:
    async with running_gateway(head_timeout_s=0.4, tls=tls if safe else None) as stack:
        reader, writer = await connected(stack, trusting() if safe else None)
        if after:
            writer.write(after)
            assert (await answer(reader))[0] == 200
            # Nothing said is no head that takes too long.
            await asyncio.sleep(0.5)
        writer.write(HALF)
        status, headers, body = await answer(reader)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (408, "head_timeout")
        assert "gateway.head_timeout_s" in error["message"]
        assert (headers["connection"], headers["server"]) == ("close", "mimo-epd")
        assert headers["x-request-id"]
        assert await is_closed(reader)
        writer.close()


@pytest.mark.parametrize("words", [HALF, b""])
async def test_connections_without_a_request_are_bounded_and_a_newcomer_is_served(words: bytes) -> None:
    async with running_gateway(max_idle_connections=8) as stack:
        crowd = [await connected(stack, None) for _ in range(20)]
        for _, writer in crowd:
            writer.write(words)
        assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in crowd[:11])))
        status, _, _ = await stack.ask()
        assert status == 200
        for _, writer in crowd:
            writer.close()


async def test_a_handshake_has_its_time_and_is_counted(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "encoder.connections")
    async with running_gateway(head_timeout_s=0.3, tls=tls) as stack:
        reader, writer = await connected(stack, None)
        assert await is_closed(reader)
        writer.close()
        reader, writer = await connected(stack, None)
        writer.write(WHOLE)
        assert not (await asyncio.wait_for(reader.read(), 5.0)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert "is no TLS: plain HTTP" in caplog.text
    async with running_gateway(max_idle_connections=4, tls=tls) as stack:
        crowd = [await connected(stack, None) for _ in range(10)]
        assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in crowd[:5])))
        reader, writer = await connected(stack, trusting())
        writer.write(WHOLE)
        assert (await answer(reader))[0] == 200
        for _, other in [*crowd, (reader, writer)]:
            other.close()


def test_tls_under_the_loop_of_the_processes(tls: Tls) -> None:
    """Requests that follow the handshake without a pause, on connections that come all at once."""

    async def one(stack: Stack) -> None:
        reader, writer = await connected(stack, trusting())
        for _ in range(3):
            writer.write(WHOLE)
            assert (await answer(reader))[0] == 200
        writer.close()

    async def main() -> None:
        async with running_gateway(tls=tls) as stack:
            await asyncio.gather(*(one(stack) for _ in range(20)))

    uvloop.run(main())


async def test_an_expectation_that_nobody_has() -> None:
    async with running_gateway() as stack:
        for path in (b"/v1/completions", b"/nowhere"):
            reader, writer = await connected(stack, None)
            head = b" HTTP/1.1\r\nHost: localhost\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}"
            writer.write(b"POST " + path + head)
            status, headers, body = await answer(reader)
            error = json.loads(body)["error"]
            assert (status, error["code"], error["type"]) == (417, "expectation_failed", "invalid_request_error")
            assert "'tea'; allowed: 100-continue" in error["message"]
            assert headers["server"] == "mimo-epd"
            writer.close()
        status, _, _ = await stack.ask()
        assert status == 200


async def test_no_answer_tells_versions() -> None:
    async with running_gateway() as stack:
        for path in ("/health", "/nowhere", "/v1/models"):
            async with stack.session.get(path) as response:
                assert response.headers["Server"] == "mimo-epd"
        reader, writer = await connected(stack, None)
        writer.write(b"no HTTP\r\n\r\n")
        assert (await answer(reader))[1]["server"] == "mimo-epd"
        writer.close()


async def test_a_stop_is_told_on_every_connection_and_the_listener_stays() -> None:
    async with running_gateway(drain_s=5.0) as stack:
        standing = [await connected(stack, None) for _ in range(3)]
        for reader, writer in standing:
            writer.write(WHOLE)
            _, headers, _ = await answer(reader)
            assert "connection" not in headers
        runner_stop = asyncio.ensure_future(stack.stop())
        await asyncio.sleep(0.1)
        for reader, writer in standing[:2]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            status, headers, body = await answer(reader)
            assert (status, headers["connection"]) == (503, "close")
            assert json.loads(body)["error"]["code"] == "shutting_down"
            assert await is_closed(reader)
        # One that came only now.
        reader, writer = await connected(stack, None)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (503, "close")
        assert not runner_stop.done(), "one that stands has not been told"
        await asyncio.wait_for(runner_stop, 3.0)
        for _, other in [*standing, (reader, writer)]:
            other.close()


async def test_a_stop_with_nobody_there_is_quick() -> None:
    async with running_gateway() as stack:
        await stack.session.close()
        started_s = asyncio.get_running_loop().time()
        await stack.stop()
        assert asyncio.get_running_loop().time() - started_s < 0.5
