"""How long a request holds its embeddings: to the first token, once, and again for a later attempt."""

import asyncio
import time
from typing import Any

import pytest

from encoder.errors import ArenaFull
from encoder.types import EncodeReply
from epd.gateway.media import MediaStage, Medium
from epd.gateway.media_parts import MediaPart
from epd.types import Role
from preprocess.types import MediaKey, MediaSource, Modality
from tests.fakes.gateway import IMAGE_URL, RENDERER, VIDEO_URL, running_gateway, says, text_of
from tests.fakes.stages import FakeFetcher, until

TEXT = "one two three four five six"
PICTURE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
CLIP = {"type": "video_url", "video_url": {"url": VIDEO_URL}}
QUESTION = {"type": "text", "text": "?"}


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
async def test_leases_end_at_the_first_token(roles: tuple[Role, ...]) -> None:
    async with running_gateway(says(TEXT), roles=roles) as stack:
        stack.workers[-1].stall_after = 3
        request = asyncio.create_task(stack.ask([PICTURE, CLIP, QUESTION]))
        await until(lambda: len(stack.encoder.released) == 2)
        assert not stack.encoder.leases
        assert not request.done()
        request.cancel()
        await until(lambda: not any(worker.num_running for worker in stack.workers))
        assert len(stack.encoder.released) == 2, "released twice"


async def test_leases_last_until_the_first_token() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.stall_after = 0
        request = asyncio.create_task(stack.ask([PICTURE, QUESTION]))
        await until(lambda: stack.worker.num_running == 1)
        await asyncio.sleep(0.05)
        assert len(stack.encoder.leases) == 1
        request.cancel()
        await until(lambda: not stack.encoder.leases)
        assert len(stack.encoder.released) == 1


async def test_an_attempt_after_the_first_token_encodes_again() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.die_after = 3
        request = asyncio.create_task(stack.ask([PICTURE, QUESTION]))
        await until(lambda: stack.worker._endpoint is None)
        stack.worker.start()
        status, body, _ = await request
        assert (status, text_of(body)) == (200, TEXT)
        assert stack.encoder.encoded == [b"image", b"image"]
        first, second = stack.worker.submitted
        assert second.num_emitted == 3
        assert [ref.lease_id for ref in (*first.embeddings, *second.embeddings)] == stack.encoder.released
        assert not stack.encoder.leases


async def test_an_answer_without_a_token_releases_too() -> None:
    async with running_gateway(lambda _: ()) as stack:
        status, _, _ = await stack.ask([PICTURE, QUESTION])
        assert status == 200
        assert len(stack.encoder.released) == 1


@pytest.mark.parametrize(
    ("needed_bytes", "taken_bytes", "status", "code"),
    [
        (1000, 1344, 413, "embedding_too_large"),
        (720, 1088, 413, "embedding_too_large"),  # by its pages only
        (600, 960, 503, "embedding_cache_full"),
    ],
)
async def test_media_that_never_fit_together_are_too_large(
    needed_bytes: int, taken_bytes: int, status: int, code: str
) -> None:
    """The fake's arena has 1024 bytes in pages of 64; a picture has 288."""
    async with running_gateway(says(TEXT)) as stack:
        stack.encoder.errors[b"video"] = ArenaFull("full", retry_after_s=1.0, needed_bytes=needed_bytes)
        found, body, headers = await stack.ask([PICTURE, CLIP, QUESTION])
        assert (found, body["error"]["code"]) == (status, code)
        assert body["error"]["param"] == "messages[0].content[1].video_url"
        assert ("Retry-After" in headers) == (status == 503)
        if status == 413:
            assert f"{taken_bytes} bytes" in body["error"]["message"]
            assert "1024" in body["error"]["message"]
        assert not stack.encoder.leases
        assert len(stack.encoder.released) == 1


def test_the_text_has_several_tokens() -> None:
    assert len(RENDERER.vocabulary.encode(TEXT)) > 3


async def test_downloads_of_a_request_have_one_asker() -> None:
    """So that a request with many URLs has its share of the downloads and no more."""
    async with running_gateway(says(TEXT)) as stack:
        for _ in range(2):
            status, _, _ = await stack.ask([PICTURE, CLIP, QUESTION])
            assert status == 200
        first, second, third, fourth = stack.fetcher.askers
        assert first is second is not None
        assert third is fourth is not None
        assert first is not third


async def test_an_answer_that_comes_in_the_moment_of_leaving_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that is cancelled in the step of the loop in which its medium is done."""
    async with running_gateway(says(TEXT)) as stack:
        ask, answered, leave = stack.encoder.encode, asyncio.Event(), asyncio.Event()

        async def encode(*arguments: Any) -> EncodeReply:
            await leave.wait()
            answered.set()
            return await ask(*arguments)

        monkeypatch.setattr(stack.encoder, "encode", encode)
        asked = MediaStage(
            fetcher=FakeFetcher(), encoder=stack.encoder, processor=None, clock=time.monotonic, patience_s=lambda: 9.0
        )
        medium = Medium(MediaPart("part", MediaSource(Modality.IMAGE, IMAGE_URL)), b"image", MediaKey("k"))
        request = asyncio.create_task(asked.encode(medium, time.time() + 60))
        await asyncio.sleep(0.01)
        leave.set()
        await answered.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(0.05)
        assert stack.encoder.encoded == [b"image"]
        assert not stack.encoder.leases
