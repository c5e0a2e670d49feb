"""/ready where replicas come and go, and health beside a worker that serves by itself."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from encoder.cluster import ClusterKeys, new_secret
from epd.gateway.health import StageHealth, encoder_health, serving_health, worker_health
from epd.transport.sockets import WorkerEndpoint
from epd.types import Hello, Role, WorkerInfo
from tests.e2e.service import free_port
from tests.fakes.gateway import running_gateway

KEYS = ClusterKeys.derive(new_secret().encode())


async def ready(session: aiohttp.ClientSession, url: str = "/ready") -> tuple[int, list[str]]:
    """Status, and what is waited for."""
    async with session.get(url) as response:
        waiting = (await response.json()).get("waiting_for", [])
        return response.status, waiting if isinstance(waiting, list) else sorted(waiting)


@pytest.mark.parametrize(("needs_all", "status"), [(True, 503), (False, 200)])
async def test_one_worker_of_a_stage_may_be_enough(needs_all: bool, status: int) -> None:
    async with running_gateway(roles=(Role.BOTH, Role.BOTH), ready_needs_all=needs_all) as stack:
        stack.workers[1].die()
        while (await ready(stack.session))[0] != status:
            pass
        stack.workers[0].die()
        while (await ready(stack.session)) != (503, ["worker"]):
            pass


async def test_a_stage_whose_processes_are_not_found_is_named() -> None:
    addresses = {"decode": ("tcp://decode.invalid:7002",), "encoders": ("tcp://encoder.invalid:7003",)}
    async with running_gateway(ready_needs_all=False, **addresses) as stack, stack.session.get("/ready") as response:
        waiting = (await response.json())["waiting_for"]
        assert waiting["decode"] == ["tcp://decode.invalid:7002: no process is known there"]


@asynccontextmanager
async def worker(role: Role) -> AsyncIterator[WorkerEndpoint]:
    """A worker that answers greetings, on a thread of its own."""
    endpoint = WorkerEndpoint("tcp://127.0.0.1:*", keys=KEYS)
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            for received in endpoint.receive(0.05):
                assert isinstance(received.message, Hello)
                info = WorkerInfo(
                    sequence=received.message.sequence,
                    worker="w",
                    incarnation="1",
                    role=role,
                    address=endpoint.address,
                    model="m",
                    max_context_tokens=1,
                    eos_token_ids=(),
                    num_waiting=3,
                    num_running=0,
                    full_pages_free=1,
                    full_pages_total=1,
                    window_pages_free=1,
                    window_pages_total=1,
                    ready=True,
                )
                endpoint.send(received.peer, info)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield endpoint
    finally:
        over.set()
        thread.join()
        endpoint.close()


async def test_health_beside_a_worker() -> None:
    port = free_port()
    async with (
        worker(Role.DECODE) as endpoint,
        worker_health(endpoint.address, Role.DECODE, keys=KEYS) as health,
        serving_health(health, host="127.0.0.1", port=port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        while (await ready(session))[0] != 200:
            pass
        async with session.get("/health") as response:
            assert response.status == 200
        async with session.get("/metrics") as response:
            text = await response.text()
        assert 'mimo_decode_queue_requests{state="waiting",worker="w"} 3.0' in text
        assert "mimo_prefill" not in text


async def test_health_beside_one_that_is_not_up_or_is_another() -> None:
    port = free_port()
    nobody = f"tcp://127.0.0.1:{free_port()}"
    async with (
        worker_health(nobody, Role.PREFILL, keys=KEYS) as health,
        serving_health(health, host="127.0.0.1", port=port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        assert await ready(session) == (503, [f"{nobody}: not connected"])
        async with session.get("/health") as response:
            assert response.status == 200
    async with worker(Role.DECODE) as endpoint, worker_health(endpoint.address, Role.PREFILL, keys=KEYS) as health:
        wrong = f"{endpoint.address}: is a decode worker, not a prefill worker"
        async with (
            serving_health(health, host="127.0.0.1", port=port),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        ):
            while (await ready(session)) != (503, [wrong]):
                pass
    async with encoder_health(nobody, keys=KEYS) as health:
        assert health.why_not_ready() == f"{nobody}: not up"


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02\x00\x01\x00\xff" * 8, b"\xff" + bytes(8) + b"\x7f\x03\x01", b"GET / HTTP/9\r\n\r\n"]
)
async def test_what_is_no_http_is_one_line_in_the_log(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Of TLS, a greeting of ZMQ and half of HTTP; however often."""
    port = free_port()
    health = StageHealth(why_not_ready=lambda: None, metrics=list)
    async with serving_health(health, host="127.0.0.1", port=port):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said + b"\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400") or said.startswith(b"\xff")
            writer.close()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert lines[0].exc_info is None
    assert "\n" not in lines[0].getMessage()
