"""Bodies on their way in: declared as plain JSON, bounded in size and time, and never in the way of others."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fakes.gateway import Stack, chat_body, running_gateway, says
from tests.fakes.stages import until

JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def raw_post(stack: Stack, headers: dict[str, str], body: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A request written by hand, perhaps not to its end; gives what reads the answer."""
    url = urlsplit(stack.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = "".join(f"{name}: {value}\r\n" for name, value in (JSON | headers).items())
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + body)
    try:
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader, timeout_s: float = 3.0) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(timeout_s):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    return int(head.split()[1]), answer["error"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "xxx"])
@pytest.mark.parametrize("packed", [True, False])
async def test_a_compressed_body_is_refused_by_its_header(
    encoding: str, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = json.dumps(chat_body()).encode()
    async with running_gateway() as stack:
        body = gzip.compress(plain) if packed else b"xxx"
        status, answer, _ = await stack.post(body, headers={"Content-Encoding": encoding})
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
        assert answer["error"]["param"] == "Content-Encoding"
        assert (await stack.post(plain, headers={"Content-Encoding": "identity"}))[0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
async def test_a_body_must_say_that_it_is_json(content_type: str, status: int) -> None:
    async with running_gateway() as stack:
        found, answer, _ = await stack.post(json.dumps(chat_body()).encode(), headers={"Content-Type": content_type})
        assert found == status
        if status == 415:
            assert answer["error"]["param"] == "Content-Type"


async def test_a_body_too_large_is_refused_before_it_comes() -> None:
    async with (
        running_gateway(max_body_bytes=1000) as stack,
        raw_post(stack, {"Content-Length": "1001"}) as reader,
    ):
        status, error = await read_answer(reader)
        assert (status, error["code"]) == (413, "body_too_large")


async def test_a_body_too_large_is_refused_when_its_length_was_not_said() -> None:
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    async with (
        running_gateway(max_body_bytes=1000) as stack,
        raw_post(stack, {"Transfer-Encoding": "chunked"}, chunk) as reader,
    ):
        status, error = await read_answer(reader)
        assert (status, error["code"]) == (413, "body_too_large")


async def test_a_body_framed_wrongly_is_the_client_s_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running_gateway() as stack,
        raw_post(stack, {"Transfer-Encoding": "chunked"}, b"2\r\n{ \r\nzz\r\n") as reader,
    ):
        assert int((await asyncio.wait_for(reader.readuntil(b"\r\n"), 3)).split()[1]) == 400
    assert "Traceback" not in caplog.text


async def test_a_slow_body_is_given_up() -> None:
    async with running_gateway(body_timeout_s=0.2) as stack, raw_post(stack, {"Content-Length": "50"}, b"{") as reader:
        status, error = await read_answer(reader)
        assert (status, error["code"]) == (408, "body_timeout")
        assert "1 bytes" in error["message"]


async def test_a_body_in_drops_is_given_up_as_well() -> None:
    async with running_gateway(body_timeout_s=0.3) as stack:

        async def drops() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" "
                await asyncio.sleep(0.05)

        async with stack.session.post("/v1/chat/completions", data=drops(), headers=JSON) as response:
            assert response.status == 408


async def test_slow_clients_keep_nobody_out() -> None:
    async with running_gateway(max_inflight=4) as stack:
        async with asyncio.timeout(20):
            slow = [raw_post(stack, {"Content-Length": "1000"}, b"{") for _ in range(50)]
            for client in slow:
                await client.__aenter__()
            assert await stack.metric("mimo_gateway_inflight_requests") == 0
            assert (await stack.ask())[0] == 200
            for client in slow:
                await client.__aexit__(None, None, None)


async def test_the_largest_of_many_large_bodies_gives_way() -> None:
    size = 200_000
    async with running_gateway(says("ok"), max_body_bytes=size, request_timeout_s=20.0) as stack:
        part = b" " * (size - 10_000)
        async with (
            raw_post(stack, {"Content-Length": str(size)}, part + b" " * 100) as largest,
            raw_post(stack, {"Content-Length": str(size)}, part),
        ):
            await asyncio.sleep(0.1)
            body = json.dumps(chat_body()).encode().ljust(150_000)
            status, _, _ = await stack.post(body)
            assert status == 200
            status, error = await read_answer(largest)
            assert (status, error["code"]) == (503, "overloaded")


async def test_a_full_server_refuses_before_the_body_comes() -> None:
    async with running_gateway(max_inflight=1) as stack:
        stack.worker.stall_after = 1
        first = asyncio.create_task(stack.ask())
        await until(lambda: stack.worker.num_running == 1)
        async with raw_post(stack, {"Content-Length": "50"}) as reader:
            assert (await read_answer(reader))[0] == 503
        first.cancel()


@pytest.mark.parametrize(
    "head",
    [
        "G<T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "nonsense\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: localhost\r\nX: {'x' * 20_000}\r\n\r\n",
        f"GET /{'x' * 20_000} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xxx\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_an_api_error_without_a_traceback(head: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway() as stack:
        url = urlsplit(stack.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head.encode())
        status, error = await read_answer(reader)
        writer.close()
        assert status == 400
        assert error["code"] == "malformed_request"
        assert error["type"] == "invalid_request_error"
        assert (await stack.ask())[0] == 200
    assert "Traceback" not in caplog.text
