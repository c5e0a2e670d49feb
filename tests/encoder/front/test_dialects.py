"""The other dialect on the same port: its routes are there, behind the same keys and the same drain."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from encoder.client import EncoderClient
from encoder.config import EncoderConfig
from encoder.front.config import FrontConfig
from encoder.front.serving import FrontServer, running_front
from encoder.process import open_server
from encoder.sglang.config import SglangConfig
from tests.fakes.encoder_peer import until


@asynccontextmanager
async def bilingual(
    model_dir: Path, *, sglang: SglangConfig | None = None, api_keys: tuple[str, ...] = ()
) -> AsyncIterator[tuple[FrontServer, aiohttp.ClientSession]]:
    config = FrontConfig(model_dir=model_dir, model_name="tiny", port=0, api_keys=api_keys, drain_s=2.0)
    encoder = EncoderConfig(arena_bytes=2**22)
    with open_server(encoder, model_dir=model_dir, name="e0", arena=f"t-{uuid.uuid4().hex}") as server:
        server.start()
        async with (
            EncoderClient.embedded(server) as client,
            running_front(config, client, sglang or SglangConfig()) as front,
            aiohttp.ClientSession(f"http://127.0.0.1:{front.port}") as http,
        ):
            await until(lambda: front.board.health().status == 200)
            yield front, http
        await server.stop(5.0)


async def status_of(http: aiohttp.ClientSession, method: str, path: str) -> int:
    async with http.request(method, path, json={} if method == "POST" else None) as response:
        return response.status


async def test_its_routes_are_served_unless_it_is_switched_off(tiny_model_dir: Path) -> None:
    async with bilingual(tiny_model_dir) as (_, http):
        assert await status_of(http, "GET", "/health_generate") == 200
        assert await status_of(http, "POST", "/encode") == 400
    async with bilingual(tiny_model_dir, sglang=SglangConfig(enabled=False)) as (_, http):
        assert await status_of(http, "GET", "/health_generate") == 404
        assert await status_of(http, "POST", "/encode") == 404


@pytest.mark.parametrize("path", ["/encode", "/scheduler_receive_url", "/send"])
async def test_keys_guard_it_as_well(tiny_model_dir: Path, path: str) -> None:
    async with bilingual(tiny_model_dir, api_keys=("secret",)) as (_, http):
        assert await status_of(http, "POST", path) == 401
        assert await status_of(http, "GET", "/health_generate") == 200


async def test_nothing_new_is_taken_while_stopping(tiny_model_dir: Path) -> None:
    async with bilingual(tiny_model_dir) as (front, http):
        async with front._front.admission.session():
            stopping = asyncio.create_task(front.stop())
            await until(lambda: front.board.ready().body["status"] == "draining")
            assert await status_of(http, "POST", "/encode") == 503
            # Receivers of parts that are under way are still heard.
            assert await status_of(http, "POST", "/scheduler_receive_url") == 400
        await stopping
