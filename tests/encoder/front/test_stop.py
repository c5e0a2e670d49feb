"""A front that is told to stop: what is in flight ends well, what is new hears why not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp

from preprocess.config import FetchLimits
from tests.fakes.encoder_peer import until
from tests.fakes.front import fronted, part
from tests.fakes.media_server import Call, media_server

FETCH = FetchLimits(allow_private_addresses=True)


async def test_what_is_in_flight_ends_well_and_what_is_new_is_refused(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    picture = make_png(1)
    async with media_server() as site, fronted(tiny_model_dir, fetch=FETCH) as parts:

        @site.script("/gated-png")
        async def _(call: Call) -> None:
            await site.gate.wait()
            await call.answer(picture)

        item = {"type": "image_url", "image_url": {"url": site.url("/gated-png")}}
        asking = [asyncio.create_task(parts.encode(item)) for _ in range(10)]
        await until(lambda: parts.front.desk.num_inflight == 10)
        stopping = asyncio.create_task(parts.front.stop())
        await until(lambda: parts.front.board.ready().body["status"] == "draining")
        assert parts.front.board.health().status == 200
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{parts.front.port}") as other,
            other.post("/v1/encode", json={"input": [part(picture)]}) as response,
        ):
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert not stopping.done()
        site.gate.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 10
        await stopping


async def test_what_does_not_end_in_time_is_ended_with_an_error(tiny_model_dir: Path) -> None:
    async with media_server() as site, fronted(tiny_model_dir, fetch=FETCH, drain_s=0.2) as parts:
        item = {"type": "image_url", "image_url": {"url": site.url("/gated")}}
        asking = asyncio.create_task(parts.encode(item))
        await until(lambda: parts.front.desk.num_inflight == 1)
        await parts.front.stop()
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert parts.front.desk.num_inflight == 0
        site.gate.set()
