"""Fetching from servers that are slow, lying, endless or broken, byte by byte, with the loop's time moved by hand.

Long, because each way of misbehaving is one small server.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import time
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from preprocess import (
    FetchLimits,
    MediaError,
    MediaForbidden,
    MediaSource,
    MediaTooLarge,
    MediaUnreachable,
    Modality,
)
from preprocess.fetch import Fetcher
from tests.fakes.loop_clock import LoopClock, settle
from tests.fakes.media_server import CONTENT, Call, MediaServer, media_server

LIMITS = FetchLimits(
    max_bytes=10_000, timeout_s=30.0, stall_timeout_s=10.0, max_redirects=3, allow_private_addresses=True
)


@pytest.fixture
async def server() -> AsyncIterator[MediaServer]:
    async with media_server() as server:
        yield server


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    async with Fetcher(LIMITS) as fetcher:
        yield fetcher


@pytest.fixture
async def clock() -> AsyncIterator[LoopClock]:
    clock = LoopClock()
    yield clock
    clock.restore()


def image(url: str) -> MediaSource:
    return MediaSource(Modality.IMAGE, url)


# Connections


async def test_connections_are_used_again(server: MediaServer, fetcher: Fetcher) -> None:
    @server.script("/moved")
    async def moved(call: Call) -> None:
        await call.answer(b"gone", status=302, headers={"Location": "/plain"})

    @server.script("/missing")
    async def missing(call: Call) -> None:
        await call.answer(b"no such picture", status=404)

    for path in ("/plain", "/moved", "/plain", "/missing", "/plain"):
        try:
            assert await fetcher.fetch(image(server.url(path))) == CONTENT
        except MediaUnreachable:
            assert path == "/missing"
    assert server.num_connections == 1
    assert server.hits == {"/plain": 4, "/moved": 1, "/missing": 1}


async def test_a_kept_connection_leads_where_it_was_checked(server: MediaServer) -> None:
    answers = ["127.0.0.1", "169.254.169.254"]

    async def rebinding(host: str, port: int) -> list[str]:
        return [answers.pop(0)]

    async with Fetcher(LIMITS, lookup=rebinding) as fetcher:
        url = server.url("/plain", host="rebind.example")
        assert await fetcher.fetch(image(url)) == CONTENT
        assert await fetcher.fetch(image(url)) == CONTENT
        assert answers == ["169.254.169.254"], "the second fetch had no reason to ask"
        server.close_idle()
        await settle()
        with pytest.raises(MediaForbidden, match=r"rebind\.example"):
            await fetcher.fetch(image(url))
    assert server.num_connections == 1


async def test_an_idle_connection_that_the_server_closed(server: MediaServer, fetcher: Fetcher) -> None:
    for _ in range(3):
        assert await fetcher.fetch(image(server.url("/plain"))) == CONTENT
        server.close_idle()
    assert server.num_connections == 3


async def test_names_are_looked_up_once_for_connections_opened_together(server: MediaServer) -> None:
    asked: list[str] = []
    answer = asyncio.Event()

    async def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        await answer.wait()
        return ["127.0.0.1"]

    async with Fetcher(LIMITS, lookup=lookup) as fetcher:
        urls = [server.url(f"/{i}", host="slow.example") for i in range(20)]
        fetches = [asyncio.create_task(fetcher.fetch(image(url))) for url in urls]
        await settle()
        fetches[0].cancel()
        await settle()
        answer.set()
        assert await asyncio.gather(*fetches[1:]) == [CONTENT] * 19
    assert asked == ["slow.example"]


async def test_proxies_of_the_environment_are_ignored(server: MediaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with Fetcher(LIMITS) as fetcher:
        assert await fetcher.fetch(image(server.url("/plain"))) == CONTENT


async def test_international_names_are_dialled_in_ascii(server: MediaServer) -> None:
    asked: list[str] = []

    async def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    async with Fetcher(LIMITS, lookup=lookup) as fetcher:
        for host in ("bücher.example", "xn--bcher-kva.example", "BÜCHER.example"):
            assert await fetcher.fetch(image(server.url(f"/{host[0]}", host=host))) == CONTENT
    assert set(asked) == {"xn--bcher-kva.example"}
    assert all("Host: xn--bcher-kva.example:" in call.head for call in server.calls)


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example", ".", "xn--a", "a b.example", "\ud800.example"])
async def test_hosts_that_cannot_be_names(fetcher: Fetcher, host: str) -> None:
    with pytest.raises(MediaError, match=r"malformed|does not resolve"):
        await fetcher.fetch(image(f"http://{host}/x"))


# Redirects


@pytest.mark.parametrize(
    ("to", "error"),
    [
        ("http://169.254.169.254/latest/meta-data/", MediaForbidden),
        ("http://metadata.example/", MediaForbidden),
        ("http://[fe80::1%25eth0]/", MediaForbidden),
        ("http://[::ffff:169.254.169.254]/", MediaForbidden),
        ("http://2852039166/", MediaForbidden),
        ("http://0xA9.0xFE.0xA9.0xFE/", MediaForbidden),
        ("//169.254.169.254/x", MediaForbidden),
        ("http://user:word@127.0.0.1/", MediaError),
        ("data:image/png;base64,AAAA", MediaForbidden),
        ("http://", MediaError),
        ("http://[1", MediaUnreachable),
        ("http://xn--a/", MediaUnreachable),
        ("http://\xff\xfe/", MediaError),
    ],
)
async def test_every_hop_is_checked(server: MediaServer, to: str, error: type[MediaError]) -> None:
    @server.script("/moved")
    async def moved(call: Call) -> None:
        await call.send(f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode("latin-1"))

    async def lookup(host: str, port: int) -> list[str]:
        return ["169.254.169.254"]

    async with Fetcher(LIMITS, lookup=lookup) as fetcher:
        with pytest.raises(error):
            await fetcher.fetch(image(server.url("/moved")))
    assert set(server.hits) == {"/moved"}


async def test_the_body_of_a_redirect_is_not_read(server: MediaServer, fetcher: Fetcher) -> None:
    @server.script("/moved")
    async def moved(call: Call) -> None:
        await call.send(b"HTTP/1.1 302 Found\r\nLocation: /plain\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n")
        await call.server.gate.wait()

    assert await fetcher.fetch(image(server.url("/moved"))) == CONTENT


# Time


async def test_headers_that_drip(server: MediaServer, fetcher: Fetcher, clock: LoopClock) -> None:
    call, waiting = await asked_for("/drip", server, fetcher)
    for letter in "HTTP":
        await call.send(letter.encode())
        await clock.advance(9.0)
    await failing_with("did not deliver within 30 s", waiting)


async def test_a_body_that_drips(server: MediaServer, fetcher: Fetcher, clock: LoopClock) -> None:
    call, waiting = await asked_for("/drip", server, fetcher)
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    for _ in range(4):
        await call.send(b"x")
        await clock.advance(9.0)
    await failing_with("did not deliver within 30 s", waiting)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"])
async def test_a_server_that_falls_silent(server: MediaServer, fetcher: Fetcher, clock: LoopClock, head: bytes) -> None:
    call, waiting = await asked_for("/silent", server, fetcher)
    await call.send(head)
    await clock.advance(9.9)
    assert not waiting.done()
    await clock.advance(0.2)
    await failing_with("sent nothing for 10 s", waiting)


async def test_a_slow_server_within_its_limits(server: MediaServer, fetcher: Fetcher, clock: LoopClock) -> None:
    call, waiting = await asked_for("/slow", server, fetcher)
    await clock.advance(9.0)
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
    await clock.advance(9.0)
    await call.send(b"b")
    await settle()
    assert await waiting == b"ab"


async def test_a_name_that_is_never_answered(clock: LoopClock) -> None:
    async def silent(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    async with Fetcher(LIMITS, lookup=silent) as fetcher:
        waiting = asyncio.create_task(fetcher.fetch(image("http://silent.example/x")))
        await clock.advance(31.0)
        with pytest.raises(MediaUnreachable, match=r"silent\.example .* within (10|30) s") as caught:
            await waiting
    assert caught.value.status == 504


async def test_waiting_for_a_slot_is_not_the_servers_fault(server: MediaServer, clock: LoopClock) -> None:
    async with Fetcher(replace(LIMITS, max_concurrency=1)) as fetcher:
        slow, waiting = await asked_for("/slow", server, fetcher)
        second = asyncio.create_task(fetcher.fetch(image(server.url("/second"))))
        for letter in "HTTP":
            await slow.send(letter.encode())
            await clock.advance(9.0)
        await failing_with("did not deliver within 30 s", waiting)
        assert await second == CONTENT


async def asked_for(path: str, server: MediaServer, fetcher: Fetcher) -> tuple[Call, asyncio.Task[bytes]]:
    """Starts a fetch and gives the server's side of it; the script does nothing by itself."""

    @server.script(path)
    async def hold(call: Call) -> None:
        await call.server.gate.wait()

    waiting = asyncio.create_task(fetcher.fetch(image(server.url(path))))
    await server.arrived.wait()
    return server.calls[-1], waiting


async def failing_with(words: str, waiting: asyncio.Task[bytes]) -> None:
    await settle()
    assert waiting.done()
    with pytest.raises(MediaUnreachable, match=words) as caught:
        await waiting
    assert (caught.value.status, caught.value.code) == (504, "media_timeout")


# Lies


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", MediaUnreachable, "before all bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", MediaTooLarge, "announces 99999999999"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nx", MediaUnreachable, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", MediaUnreachable, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", MediaUnreachable, "before all bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", MediaUnreachable, "before all bytes|not HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", MediaUnreachable, "not HTTP"),
        (b"", MediaUnreachable, "without an answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, MediaUnreachable, "not HTTP"),
        (b"HTTP/1.1 401 Nope\r\nContent-Length: 0\r\n\r\n", MediaUnreachable, r"status 401 \(Unauthorized\)"),
        (b"HTTP/1.1 403 Nope\r\nContent-Length: 0\r\n\r\n", MediaUnreachable, r"status 403 \(Forbidden\)"),
        (b"HTTP/1.1 404 Nope\r\nContent-Length: 0\r\n\r\n", MediaUnreachable, r"status 404 \(Not Found\)"),
        (b"HTTP/1.1 500 Nope\r\nContent-Length: 0\r\n\r\n", MediaUnreachable, r"status 500 \(Internal Server Error\)"),
        (b"HTTP/1.1 799 Nope\r\nContent-Length: 0\r\n\r\n", MediaUnreachable, r"status 799"),
        (b"HTTP/1.1 206 Part\r\nContent-Length: 2\r\n\r\nab", MediaUnreachable, r"status 206"),
        (b"HTTP/1.1 304 Same\r\n\r\n", MediaUnreachable, r"status 304"),
    ],
)
async def test_answers_that_do_not_do(
    server: MediaServer, fetcher: Fetcher, sent: bytes, error: type[MediaError], words: str
) -> None:
    @server.script("/liar")
    async def liar(call: Call) -> None:
        await call.send(sent)
        call.hang_up()

    with pytest.raises(error, match=words) as caught:
        await fetcher.fetch(image(server.url("/liar")))
    # aiohttp words its errors with the URL, which may hold a token.
    assert "/liar" not in caught.value.message


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "hangs_up"),
    [
        # Malformed: known before the connection ends.
        ([CHUNKED, b"zz\r\nabc"], False),
        ([CHUNKED, b"zz\r\nabc"], True),
        ([CHUNKED, b"5\r\nabcde\r\n", b"zz\r\nabc"], False),
        ([CHUNKED, b"5\r\nabcde\r\n", b"zz\r\nabc"], True),
        ([CHUNKED, b"5\r\nabcdefg\r\n"], False),
        # Merely unfinished, until it ends.
        ([CHUNKED, b"5\r\nabc"], True),
        ([b"Content-Length: 5\r\n\r\n", b"abc"], True),
    ],
)
async def test_a_body_that_goes_wrong_midway_ends_at_once(
    server: MediaServer, fetcher: Fetcher, pieces: list[bytes], hangs_up: bool
) -> None:
    @server.script("/midway")
    async def midway(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\n" + pieces[0])
        for piece in pieces[1:]:
            # Long enough for the reader to have seen what came before.
            await asyncio.sleep(0.05)
            await call.send(piece)
        if hangs_up:
            await asyncio.sleep(0.05)
            call.hang_up()
        else:
            await call.server.gate.wait()

    begun_s = time.monotonic()
    with pytest.raises(MediaUnreachable, match=r"before all bytes|not HTTP"):
        await fetcher.fetch(image(server.url("/midway")))
    # The limits here are several seconds.
    assert time.monotonic() - begun_s < 2.0
    server.gate.set()


async def test_a_body_without_a_length_ends_with_the_connection(server: MediaServer, fetcher: Fetcher) -> None:
    @server.script("/old")
    async def old(call: Call) -> None:
        await call.send(b"HTTP/1.0 200 OK\r\n\r\n" + CONTENT)
        call.hang_up()

    assert await fetcher.fetch(image(server.url("/old"))) == CONTENT


async def test_more_than_was_announced_does_not_reach_the_next_fetch(server: MediaServer, fetcher: Fetcher) -> None:
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    late = asyncio.Event()

    @server.script("/liar")
    async def liar(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello" + (b"" if late.is_set() else forged))
        if late.is_set():
            await settle()
            await call.send(forged)

    for _ in range(2):
        assert await fetcher.fetch(image(server.url("/liar"))) == b"hello"
        await settle()
        assert await fetcher.fetch(image(server.url("/plain"))) == CONTENT
        late.set()


@pytest.mark.parametrize("kind", ["text/html", "nonsense", "application/json; charset=utf-16", ""])
async def test_the_declared_type_means_nothing(server: MediaServer, fetcher: Fetcher, kind: str) -> None:
    @server.script("/typed")
    async def typed(call: Call) -> None:
        await call.answer(headers={"Content-Type": kind})

    assert await fetcher.fetch(image(server.url("/typed"))) == CONTENT


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1024),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08" + b"\0" * 7, b"\0\0\0\xff\xff" * 200),
        (b"HTTP/1.1 200 OK\r\n", b"X-Header: " + b"x" * 1000 + b"\r\n"),
    ],
)
async def test_endless_answers(server: MediaServer, fetcher: Fetcher, first: bytes, again: bytes) -> None:
    """Also a gzip stream of empty blocks, which never inflates to anything."""

    @server.script("/endless")
    async def endless(call: Call) -> None:
        await call.send(first)
        while not call.writer.is_closing():
            await call.send(again)

    with pytest.raises((MediaTooLarge, MediaUnreachable), match=r"over 10000 bytes|not HTTP"):
        await fetcher.fetch(image(server.url("/endless")))


async def test_interim_answers_without_end(server: MediaServer, fetcher: Fetcher, clock: LoopClock) -> None:
    @server.script("/endless")
    async def endless(call: Call) -> None:
        while not call.writer.is_closing():
            await call.send(b"HTTP/1.1 102 Processing\r\n\r\n")
            await asyncio.sleep(0)

    waiting = asyncio.create_task(fetcher.fetch(image(server.url("/endless"))))
    await server.arrived.wait()
    await clock.advance(31.0)
    with pytest.raises(MediaUnreachable):
        await waiting


# Sharing


async def test_one_request_leaves_slots_for_others(server: MediaServer) -> None:
    async with Fetcher(replace(LIMITS, max_concurrency=6, max_concurrency_per_request=4)) as fetcher:
        greedy = [
            asyncio.create_task(fetcher.fetch(image(server.url(f"/gated/{i}")), asker="greedy")) for i in range(100)
        ]
        await settle()
        assert server.most_open == 4
        assert await fetcher.fetch(image(server.url("/plain")), asker="modest") == CONTENT
        assert await fetcher.fetch(image(server.url("/plain"))) == CONTENT
        server.gate.set()
        assert await asyncio.gather(*greedy) == [CONTENT] * 100
        assert server.most_open <= 5


async def test_all_requests_together(server: MediaServer) -> None:
    async with Fetcher(replace(LIMITS, max_concurrency=3)) as fetcher:
        fetches = [asyncio.create_task(fetcher.fetch(image(server.url(f"/gated/{i}")))) for i in range(20)]
        await settle()
        assert server.num_open == 3
        server.gate.set()
        assert await asyncio.gather(*fetches) == [CONTENT] * 20
        assert server.most_open == 3
        assert server.num_connections == 3


async def test_a_shared_download_starts_when_any_of_its_requests_may(server: MediaServer) -> None:
    async with Fetcher(replace(LIMITS, max_concurrency=2, max_concurrency_per_request=1)) as fetcher:
        greedy = [
            asyncio.create_task(fetcher.fetch(image(server.url(f"/gated/{i}")), asker="greedy")) for i in range(9)
        ]
        await settle()
        assert server.hits == {"/gated/0": 1}
        modest = asyncio.create_task(fetcher.fetch(image(server.url("/gated/8")), asker="modest"))
        await settle()
        assert server.hits == {"/gated/0": 1, "/gated/8": 1}
        server.gate.set()
        await asyncio.gather(*greedy, modest)
        assert server.hits["/gated/8"] == 1


async def test_one_download_per_url_whatever_its_fragment(server: MediaServer, fetcher: Fetcher) -> None:
    urls = [server.url("/gated"), server.url("/gated#page=2"), server.url("/gated").replace("http:", "HTTP:")]
    fetches = [asyncio.create_task(fetcher.fetch(image(url))) for url in urls * 3]
    await settle()
    server.gate.set()
    assert await asyncio.gather(*fetches) == [CONTENT] * 9
    assert server.hits["/gated"] == 1


async def test_a_fault_reaches_every_waiter(server: MediaServer, fetcher: Fetcher) -> None:
    @server.script("/gone")
    async def gone(call: Call) -> None:
        await call.server.gate.wait()
        await call.answer(b"", status=410)

    fetches = [asyncio.create_task(fetcher.fetch(image(server.url("/gone")))) for _ in range(3)]
    await settle()
    server.gate.set()
    for found in await asyncio.gather(*fetches, return_exceptions=True):
        assert isinstance(found, MediaUnreachable)
        assert "410 (Gone)" in found.message
    assert server.hits["/gone"] == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_waiters_leave_in_any_order_and_no_slot_is_lost(server: MediaServer, order: tuple[int, ...]) -> None:
    async with Fetcher(replace(LIMITS, max_concurrency=1)) as fetcher:
        for _ in range(3):
            waiting = [asyncio.create_task(fetcher.fetch(image(server.url("/gated")))) for _ in range(3)]
            queued = asyncio.create_task(fetcher.fetch(image(server.url("/queued"))))
            at_once = asyncio.create_task(fetcher.fetch(image(server.url("/never"))))
            await settle()
            at_once.cancel()
            for index in order[:2]:
                waiting[index].cancel()
                await settle()
            assert not waiting[order[2]].done()
            assert not queued.done()
            waiting[order[2]].cancel()
            assert await queued == CONTENT
        # Cancelled before the loop has run their first step.
        born_dead = [asyncio.create_task(fetcher.fetch(image(server.url(f"/{i}")))) for i in range(3)]
        await asyncio.sleep(0)
        for task in born_dead:
            task.cancel()
        await asyncio.gather(*born_dead, return_exceptions=True)
        assert await fetcher.fetch(image(server.url("/plain"))) == CONTENT
    assert "/never" not in server.hits


async def test_closing_tells_the_waiters(server: MediaServer) -> None:
    async with Fetcher(replace(LIMITS, max_concurrency=1)) as fetcher:
        running, queued = (asyncio.create_task(fetcher.fetch(image(server.url(f"/gated/{i}")))) for i in range(2))
        await settle()
    for task in (running, queued):
        with pytest.raises(MediaUnreachable, match="stopped"):
            await task


# Growth


async def test_no_descriptor_stays_behind(server: MediaServer) -> None:
    @server.script("/liar")
    async def liar(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort")
        call.hang_up()

    @server.script("/large")
    async def large(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 20_000)

    async def some(fetcher: Fetcher) -> None:
        for path in ("/plain", "/liar", "/large"):
            fetches = [fetcher.fetch(image(server.url(f"{path}?{i}"))) for i in range(10)]
            await asyncio.gather(*fetches, return_exceptions=True)
        cancelled = [asyncio.create_task(fetcher.fetch(image(server.url(f"/gated/{i}")))) for i in range(5)]
        await settle()
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        server.close_idle()
        await settle()

    async with Fetcher(LIMITS) as fetcher:
        await some(fetcher)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            await some(fetcher)
        assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_garbage_after_the_compressed_content_takes_no_memory(server: MediaServer) -> None:
    @server.script("/tail")
    async def tail(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(CONTENT))
        for _ in range(100):
            await call.send(b"garbage." * 8192)
        call.hang_up()

    async with Fetcher(replace(LIMITS, max_bytes=8_000_000)) as fetcher:
        tracemalloc.start()
        assert await fetcher.fetch(image(server.url("/tail"))) == CONTENT
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 3_000_000
