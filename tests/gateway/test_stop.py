"""The end of a gateway: it refuses what is new, lets answers end, and ends those that do not, all within its drain."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epd.types import Role
from tests.fakes.gateway import IMAGE_URL, MODEL_DIR, Stack, chat_body, running_gateway, says, text_of_events
from tests.fakes.stages import until

TEXT = "one two three four five six"
PICTURE = [{"type": "image_url", "image_url": {"url": IMAGE_URL}}, {"type": "text", "text": "?"}]


async def stalled(stack: Stack, request: "asyncio.Task[Any]") -> None:
    await until(lambda: stack.worker.num_running == 1 or request.done())
    assert not request.done()
    await asyncio.sleep(0.05)


async def test_what_is_in_flight_ends_and_what_is_new_is_refused() -> None:
    async with running_gateway(says(TEXT), drain_s=5.0) as stack:
        stack.worker.stall_after = 2
        request = asyncio.create_task(stack.events())
        await stalled(stack, request)
        stopping = asyncio.ensure_future(stack.stop())
        await asyncio.sleep(0.05)
        status, body, headers = await stack.ask()
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert int(headers["Retry-After"]) >= 1
        async with stack.session.get("/ready") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
        async with stack.session.get("/health") as response:
            assert response.status == 200
        stack.worker.die()
        started_s = time.monotonic()
        events = await request
        assert events[-1]["error"]["code"] == "stage_unavailable"
        await stopping
        assert time.monotonic() - started_s < 2.0, "the stop waited although nothing was in flight"


async def test_an_answer_that_ends_within_the_drain_is_whole() -> None:
    async with running_gateway(says("word " * 300), drain_s=5.0) as stack:
        request = asyncio.create_task(stack.events(max_tokens=1000))
        await until(lambda: stack.worker.num_running == 1)
        await stack.stop()
        events = await request
        assert events[-1] == "[DONE]"
        assert text_of_events(events) == "word " * 300


async def test_what_does_not_end_is_ended_with_an_error() -> None:
    async with running_gateway(says(TEXT), drain_s=0.2) as stack:
        stack.worker.stall_after = 2
        stream, whole = asyncio.create_task(stack.events()), asyncio.create_task(stack.ask())
        await until(lambda: stack.worker.num_running == 2)
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
        await stack.stop()
        assert time.monotonic() - started_s < 2.0
        events = await stream
        assert text_of_events(events[:-1]) == "one two"
        assert events[-1]["error"]["code"] == "shutting_down"
        status, body, headers = await whole
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert "Retry-After" in headers


async def test_a_body_still_arriving_is_refused_at_the_end_of_the_drain() -> None:
    async with running_gateway(drain_s=0.1) as stack:

        async def slow_body() -> Any:
            yield b"{"
            await asyncio.sleep(30)

        request = asyncio.ensure_future(
            stack.session.post("/v1/chat/completions", data=slow_body(), headers={"Content-Type": "application/json"})
        )
        await asyncio.sleep(0.1)
        started_s = time.monotonic()
        await stack.stop()
        assert time.monotonic() - started_s < 3.0
        with contextlib.suppress(aiohttp.ClientError):
            assert (await request).status == 503


@pytest.mark.parametrize("gone", ["worker", "encoder"])
async def test_a_draining_gateway_waits_for_no_stage(gone: str) -> None:
    async with running_gateway(says(TEXT), drain_s=20.0, restart_wait_s=30.0) as stack:
        stack.worker.stall_after = 2
        request = asyncio.create_task(stack.events(PICTURE))
        await stalled(stack, request)
        stopping = asyncio.ensure_future(stack.stop())
        await asyncio.sleep(0.05)
        stack.encoder.up = gone != "encoder"
        stack.worker.die()
        started_s = time.monotonic()
        events = await request
        assert events[-1]["error"]["code"] in ("stage_unavailable", "encoder_unavailable")
        await stopping
        assert time.monotonic() - started_s < 3.0


async def test_a_request_that_waits_for_a_stage_stops_waiting() -> None:
    async with running_gateway(drain_s=20.0, restart_wait_s=30.0, roles=(Role.PREFILL, Role.DECODE)) as stack:
        stack.workers[1].die()
        await asyncio.sleep(0.02)
        request = asyncio.create_task(stack.ask())
        await asyncio.sleep(0.05)
        stopping = asyncio.ensure_future(stack.stop())
        status, body, _ = await asyncio.wait_for(request, 2)
        assert (status, body["error"]["code"]) == (503, "stage_unavailable")
        await asyncio.wait_for(stopping, 3)


def test_the_process_ends_by_itself_after_sigterm(tmp_path: Path) -> None:
    """Real sockets to workers that are not there: a request waits for them, SIGTERM ends it, the exit code is 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        "from pathlib import Path; from epd import run_gateway; from epd.config import GatewayConfig\n"
        f"run_gateway(GatewayConfig(model_dir=Path({str(MODEL_DIR)!r}), model_name='tiny', port={port},"
        f" prefill=('ipc://{tmp_path}/p',), encoders=('ipc://{tmp_path}/e',), restart_wait_s=60.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        answer = _ask_and_stop(process, port)
        assert process.wait(10) == 0, process.stderr.read() if process.stderr else None
    finally:
        process.kill()
        process.communicate()
    assert b" 503 " in answer.partition(b"\r\n")[0]
    assert b"stage_unavailable" in answer


def _ask_and_stop(process: "subprocess.Popen[bytes]", port: int) -> bytes:
    deadline = time.monotonic() + 60
    while True:
        try:
            client = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
    body = json.dumps(chat_body(stream=True)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Connection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with client:
        client.sendall(head.encode() + body)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
        client.settimeout(10)
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    return answer
