"""A tower that comes to no end: seen by the replica itself, by the health check, and by the metrics."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from encoder.config import EncoderConfig
from tests.fakes.encoder_peer import until
from tests.fakes.front import fronted, part


async def test_a_tower_that_is_stuck_turns_the_health_red_and_one_that_works_again_green(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    config = EncoderConfig(arena_bytes=2**22, wedged_after_s=0.3)
    async with fronted(tiny_model_dir, encoder=config) as parts:
        await until(lambda: parts.front.board.health().status == 200)
        stuck = threading.Event()
        parts.server._runner._thread.submit(stuck.wait)
        try:
            asking = asyncio.create_task(parts.encode(part(make_png(1))))
            await until(lambda: parts.front.board.health().status == 503)
            async with parts.http.get("/health") as response:
                assert response.status == 503
                told = (await response.json())["replicas"]["e0"]
                assert told.startswith("its tower has been at one batch for")
            info = parts.server.info()
            assert info.wedged
            assert info.tower_busy_s > 0.3
            assert await parts.metric('mimo_encoder_wedged{replica="e0"}') == 1
            assert await parts.metric('mimo_encoder_tower_busy_seconds{replica="e0"}') > 0.3
        finally:
            stuck.set()
        assert (await asking)[0] == 200
        await until(lambda: parts.front.board.ready().status == 200)
        assert parts.server.info().tower_busy_s == 0


async def test_many_who_wait_for_a_tower_that_works_are_no_fault(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    config = EncoderConfig(arena_bytes=2**22, wedged_after_s=5.0, max_batch_jobs=1)
    async with fronted(tiny_model_dir, encoder=config) as parts:
        await until(lambda: parts.front.board.health().status == 200)
        seen: set[int] = set()
        asking = asyncio.gather(*(parts.encode(part(make_png(seed))) for seed in range(40)))
        while not asking.done():
            async with parts.http.get("/health") as response:
                seen.add(response.status)
            await asyncio.sleep(0.01)
        assert {status for status, _ in asking.result()} == {200}
        assert seen == {200}
