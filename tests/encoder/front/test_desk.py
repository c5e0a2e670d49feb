"""The desk: where rows lie, whose the leases are, and what is refused before any work."""

import asyncio
import contextlib
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encoder.cache.arena import segment_path
from encoder.errors import EncodeDeadline, EncoderBusy
from encoder.local import LocalEncoder
from encoder.types import EncodeReply
from preprocess.config import FetchLimits
from preprocess.errors import MediaInvalid, MediaUndecodable
from preprocess.types import MediaOptions, MediaSource, Modality
from tests.fakes.encoder_peer import until
from tests.fakes.front import Fronted, data_url, fronted
from tests.fakes.media_server import media_server

FETCH = FetchLimits(allow_private_addresses=True)


def image(content: bytes) -> MediaSource:
    return MediaSource(Modality.IMAGE, data_url(content))


def soon() -> float:
    return time.time() + 30


def leased_bytes(parts: Fronted) -> int:
    return parts.server.info().leased_bytes


async def test_rows_are_the_arenas_own_until_they_are_released(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    local = LocalEncoder(tiny_model_dir)
    expected = local.encode(make_png(1), Modality.IMAGE)
    async with fronted(tiny_model_dir) as parts:
        encoding = await parts.front.desk.encode(image(make_png(1)), asker=1, deadline_unix_s=soon())
        assert isinstance(encoding.rows.obj, mmap.mmap)
        assert (encoding.num_rows, encoding.width) == expected.rows.shape
        assert bytes(encoding.rows) == expected.rows.tobytes()
        assert leased_bytes(parts) > 0
        encoding.release()
        encoding.release()
        await until(lambda: leased_bytes(parts) == 0)
    local.close()


async def test_an_arena_that_cannot_be_mapped_here_leads_to_the_bytes_themselves(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    async with fronted(tiny_model_dir) as parts:
        desk = parts.front.desk
        first = await desk.encode_content(make_png(1), Modality.IMAGE, MediaOptions(), deadline_unix_s=soon())
        expected = bytes(first.rows)
        first.release()
    async with fronted(tiny_model_dir) as parts:
        desk = parts.front.desk
        other = await desk.encode_content(make_png(2), Modality.IMAGE, MediaOptions(), deadline_unix_s=soon())
        other.release()
        # As on another host: the name leads nowhere. A mapping that was made before is not known to this desk.
        for name in list(desk._reader._mapped):
            segment_path(name).unlink()
        desk._reader._mapped.clear()
        again = await desk.encode_content(make_png(1), Modality.IMAGE, MediaOptions(), deadline_unix_s=soon())
        assert not isinstance(again.rows.obj, mmap.mmap)
        assert bytes(again.rows) == expected
        again.release()
        # It is known by now, and nobody is asked in vain any more.
        assert desk._only_elsewhere()
        requests = parts.server.info().counters["requests"]
        third = await desk.encode_content(make_png(1), Modality.IMAGE, MediaOptions(), deadline_unix_s=soon())
        assert bytes(third.rows) == expected
        assert parts.server.info().counters["requests"] == requests + 1
        third.release()
        await until(lambda: leased_bytes(parts) == 0)


async def test_an_option_above_the_ceiling_is_refused_before_anything_is_fetched(tiny_model_dir: Path) -> None:
    async with media_server() as site, fronted(tiny_model_dir, fetch=FETCH) as parts:
        source = MediaSource(Modality.IMAGE, site.url("/a"), MediaOptions(max_pixels=2**30))
        with pytest.raises(MediaInvalid, match="allowed is at most 262144"):
            await parts.front.desk.encode(source, asker=1, deadline_unix_s=soon())
        assert not site.hits


async def test_a_digest_that_differs_is_refused(tiny_model_dir: Path, make_png: Callable[..., bytes]) -> None:
    async with fronted(tiny_model_dir) as parts:
        with pytest.raises(MediaInvalid, match="SHA-256"):
            await parts.front.desk.encode(image(make_png(1)), asker=1, deadline_unix_s=soon(), sha256=b"\0" * 32)


async def test_the_deadline_counts_while_the_content_is_fetched(tiny_model_dir: Path) -> None:
    async with media_server() as site, fronted(tiny_model_dir, fetch=FETCH) as parts:
        source = MediaSource(Modality.IMAGE, site.url("/gated"))
        with pytest.raises(EncodeDeadline):
            await parts.front.desk.encode(source, asker=1, deadline_unix_s=time.time() + 0.1)
        assert parts.front.desk.num_inflight == 0
        site.gate.set()


async def test_no_more_media_than_allowed_at_a_time(tiny_model_dir: Path, make_png: Callable[..., bytes]) -> None:
    async with media_server() as site, fronted(tiny_model_dir, fetch=FETCH, max_inflight=1, max_items=1) as parts:
        desk = parts.front.desk
        source = MediaSource(Modality.IMAGE, site.url("/gated"))
        asking = asyncio.create_task(desk.encode(source, asker=1, deadline_unix_s=soon()))
        await until(lambda: desk.num_inflight == 1)
        with pytest.raises(EncoderBusy):
            desk.check_room(1)
        with pytest.raises(EncoderBusy):
            await desk.encode(image(make_png(1)), asker=2, deadline_unix_s=soon())
        site.gate.set()
        with pytest.raises(MediaUndecodable):
            await asking
        desk.check_room(1)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.003, 0.01, 0.03, 0.1])
async def test_whoever_leaves_at_any_moment_leaves_no_lease_behind(
    tiny_model_dir: Path, make_png: Callable[..., bytes], delay_s: float
) -> None:
    async with fronted(tiny_model_dir) as parts:
        asking = asyncio.create_task(parts.front.desk.encode(image(make_png(1)), asker=1, deadline_unix_s=soon()))
        await asyncio.sleep(delay_s)
        asking.cancel()
        done = (await asyncio.gather(asking, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            done.release()
        await parts.until_idle()


async def test_an_answer_that_comes_in_the_moment_of_leaving_is_given_back(
    tiny_model_dir: Path, make_png: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(tiny_model_dir) as parts:
        ask, answered = parts.client.encode, asyncio.Event()

        async def too_late(*arguments: Any) -> EncodeReply:
            reply = await ask(*arguments)
            answered.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return reply

        monkeypatch.setattr(parts.client, "encode", too_late)
        asking = asyncio.create_task(parts.front.desk.encode(image(make_png(1)), asker=1, deadline_unix_s=soon() + 60))
        await answered.wait()
        assert leased_bytes(parts) > 0
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await parts.until_idle()
