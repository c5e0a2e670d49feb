"""An encoder in SGLang's dialect on a real port, in front of a desk of known embeddings."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from encoder.sglang.config import SglangConfig
from encoder.sglang.dialect import SglangDialect
from encoder.sglang.routes import add_routes
from tests.fakes.sglang_desk import FakeDesk


@dataclass
class Encoder:
    """What a test sees of it."""

    url: str
    port: int
    desk: FakeDesk
    dialect: SglangDialect
    session: aiohttp.ClientSession

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and JSON."""
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def is_quiet(self) -> None:
        """All that a request takes is given back."""
        names = ("parts", "leases", "waiting_receivers", "messages")
        await until(lambda: not any(self.dialect.gauges()[name] for name in names) and not self.desk.num_leased)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Look until it is so. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        # What is looked at has no event.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Opener = Callable[..., Awaitable[Encoder]]


@asynccontextmanager
async def opened(config: SglangConfig, desk: FakeDesk) -> AsyncIterator[Encoder]:
    dialect = SglangDialect(desk, config)
    app = web.Application()
    add_routes(app, dialect)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", health)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    await dialect.start()
    dialect.announce(port, host="127.0.0.1")
    async with aiohttp.ClientSession() as session:
        try:
            yield Encoder(f"http://127.0.0.1:{port}", port, desk, dialect, session)
        finally:
            await dialect.stop()
            await runner.cleanup()


@pytest.fixture
async def open_encoder() -> AsyncIterator[Opener]:
    """Start an encoder: `await open_encoder(send_timeout_s=1.0)`."""
    async with AsyncExitStack() as stack:

        async def start(desk: FakeDesk | None = None, **settings: object) -> Encoder:
            config = SglangConfig(**settings)  # type: ignore[arg-type]
            return await stack.enter_async_context(opened(config, desk or FakeDesk()))

        yield start
