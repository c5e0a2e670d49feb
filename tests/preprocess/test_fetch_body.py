"""Bodies: every compressed form in every cut, under a cap that counts both ends."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess import MediaTooLarge, MediaUnreachable, MediaUnsupported
from preprocess.fetch_body import Body, InflatingBody, open_body

CONTENT = bytes(range(256)) * 40
CAP = 20_000


def raw_deflate(content: bytes) -> bytes:
    squeeze = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return squeeze.compress(content) + squeeze.flush()


async def collected(encoding: str, *chunks: bytes, max_bytes: int = CAP) -> bytes:
    body = open_body(encoding, host="host.example", max_bytes=max_bytes)
    for chunk in chunks:
        await body.feed(chunk)
    return body.finish()


@pytest.mark.parametrize("encoding", ["", "identity", " Identity ", "none", "aws-chunked", "identity, aws-chunked"])
async def test_plain(encoding: str) -> None:
    assert await collected(encoding, CONTENT[:7], CONTENT[7:]) == CONTENT


FORMS = {
    "gzip": gzip.compress(CONTENT),
    "x-gzip": gzip.compress(CONTENT[:100]) + gzip.compress(CONTENT[100:]),
    "GZIP": gzip.compress(CONTENT) + b"\0\0\0 and more",
    "deflate": zlib.compress(CONTENT),
    "Deflate": raw_deflate(CONTENT),
}


@pytest.mark.parametrize("encoding", FORMS)
async def test_compressed_byte_by_byte(encoding: str) -> None:
    sent = FORMS[encoding]
    assert await collected(encoding, sent) == CONTENT
    assert await collected(encoding, *(sent[i : i + 1] for i in range(len(sent)))) == CONTENT


@given(
    content=st.binary(max_size=3000),
    cuts=st.lists(st.integers(0, 3000), max_size=5),
    level=st.integers(0, 9),
    copies=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_members_in_any_cut(content: bytes, cuts: list[int], level: int, copies: int) -> None:
    sent = b"".join(gzip.compress(content, level) for _ in range(copies))
    edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    chunks = [sent[a:b] for a, b in itertools.pairwise(edges)]
    assert asyncio.run(collected("gzip", *chunks)) == content * copies


@pytest.mark.parametrize("form", ["gzip", "deflate", "Deflate"])
async def test_every_cut_end_is_noticed(form: str) -> None:
    sent = FORMS[form]
    for cut in (*range(0, len(sent), max(len(sent) // 40, 1)), len(sent) - 1):
        with pytest.raises(MediaUnreachable, match="ended its compressed content early"):
            await collected(form, sent[:cut])


async def test_damage() -> None:
    sent = bytearray(FORMS["gzip"])
    sent[-6] ^= 1
    with pytest.raises(MediaUnreachable, match="does not inflate"):
        await collected("gzip", bytes(sent))
    with pytest.raises(MediaUnreachable, match="does not inflate"):
        await collected("gzip", b"<html>not compressed at all</html>")


async def test_caps() -> None:
    assert await collected("", b"x" * CAP) == b"x" * CAP
    assert await collected("gzip", gzip.compress(b"x" * CAP)) == b"x" * CAP
    for encoding, sent in (
        ("", b"x" * (CAP + 1)),
        ("gzip", gzip.compress(b"x" * (CAP + 1))),
        ("gzip", FORMS["gzip"] + b"garbage" * CAP),
        ("deflate", b"\x78\x9c" + b"\0\0\0\xff\xff" * CAP),
    ):
        with pytest.raises(MediaTooLarge, match=rf"host\.example sends over {CAP} bytes"):
            await collected(encoding, sent)


async def test_a_bomb_unfolds_one_piece_at_a_time() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000, 9)
    assert len(bomb) < 100_000
    tracemalloc.start()
    with pytest.raises(MediaTooLarge):
        await collected("gzip", bomb, max_bytes=500_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


async def test_a_large_content_within_the_cap() -> None:
    """Longer than a piece, so that the decompressor holds more than it hands out at once."""
    content = b"\0" * 5_000_000 + CONTENT
    assert await collected("gzip", gzip.compress(content), max_bytes=10_000_000) == content


async def test_an_end_that_the_decompressor_holds_without_more_input() -> None:
    """Right above a whole piece, bare deflate takes all its bytes in and has some left to give out."""
    for more in (0, 1, 5, 9, 158):
        content = b"\0" * ((1 << 20) + more)
        assert await collected("deflate", raw_deflate(content), max_bytes=1 << 21) == content


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip, br", "compress"])
def test_others_are_refused(encoding: str) -> None:
    with pytest.raises(MediaUnsupported, match="although none was asked for"):
        open_body(encoding, host="host.example", max_bytes=CAP)


def test_kinds() -> None:
    assert type(open_body("", host="h", max_bytes=1)) is Body
    assert type(open_body("gzip", host="h", max_bytes=1)) is InflatingBody
