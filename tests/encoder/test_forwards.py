"""How often the towers run, and for whom: once for each content, never for one that only looks like it."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from encoder.client import ArenaReader
from encoder.types import EncodeReply
from tests.fakes.encoder_peer import CONFIG, Opener, Peer

Rows = NDArray[np.float32]


async def rows_of(peer: Peer, *contents: bytes) -> list[Rows]:
    """Of media that one request brings, asked for at the same time."""
    ids = [peer.send(peer.request(content), content) for content in contents]
    answers = await asyncio.gather(*(peer.answer(request_id) for request_id in ids))
    found = []
    for answer in answers:
        assert isinstance(answer, EncodeReply), answer
        found.append(ArenaReader().array(answer.ref).copy())
        peer.release(answer)
    return found


def forwards(peer: Peer) -> float:
    return peer.server.info().counters["batch_jobs"]


@pytest.fixture
def twins(make_png: Callable[..., bytes]) -> tuple[bytes, bytes]:
    """Two pictures of one size that differ in one pixel by one."""
    with Image.open(io.BytesIO(make_png(7))) as image:
        pixels = np.asarray(image).copy()
    pixels[40, 50, 1] ^= 1
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return make_png(7), buffer.getvalue()


async def test_one_pixel_makes_another_picture(open_peer: Opener, twins: tuple[bytes, bytes]) -> None:
    async with open_peer() as peer:
        together = await rows_of(peer, *twins)
        assert forwards(peer) == 2
        assert together[0].shape == together[1].shape
        # Every row of a picture sees the pixel through the blocks with full attention; its own row most of all.
        assert not np.array_equal(together[0], together[1])
    for index, content in enumerate(twins):
        async with open_peer() as peer:
            (alone,) = await rows_of(peer, content)
            np.testing.assert_array_equal(alone, together[index])


async def test_the_same_picture_twice_in_one_prompt(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer() as peer:
        first, second, third = await rows_of(peer, make_png(1), make_png(1), make_png(1))
        assert forwards(peer) == 1
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, third)


async def test_order_and_company_do_not_matter(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    a, b, c = make_png(1), make_png(2, 64, 64), make_png(3, 160, 96)
    async with open_peer(replace(CONFIG, max_batch_wait_s=0.05)) as peer:
        first_a, first_b = await rows_of(peer, a, b)
        assert forwards(peer) == 2
        second_b, second_a = await rows_of(peer, b, a)
        assert forwards(peer) == 2
        third_a, third_c = await rows_of(peer, a, c)
        assert forwards(peer) == 3
    np.testing.assert_array_equal(first_a, second_a)
    np.testing.assert_array_equal(first_a, third_a)
    np.testing.assert_array_equal(first_b, second_b)
    for content, rows in ((a, first_a), (b, first_b), (c, third_c)):
        async with open_peer() as peer:
            (alone,) = await rows_of(peer, content)
            np.testing.assert_array_equal(alone, rows)


async def test_fifty_requests_for_one_picture_at_once(open_peer: Opener, make_png: Callable[..., bytes]) -> None:
    async with open_peer(replace(CONFIG, max_pending=64)) as peer:
        found = await rows_of(peer, *[make_png(1)] * 50)
        assert forwards(peer) == 1
        assert peer.server.info().counters["joined"] == 49
        assert all(np.array_equal(rows, found[0]) for rows in found)
        info = peer.server.info()
        assert (info.num_pending, info.leased_bytes) == (0, 0)
