"""Fetching over HTTP, against a real server on loopback."""

from __future__ import annotations

import asyncio
import base64
import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
from aiohttp import web
from yarl import URL

from preprocess import (
    FetchLimits,
    MediaError,
    MediaForbidden,
    MediaInvalid,
    MediaSource,
    MediaTooLarge,
    MediaUnreachable,
    MediaUnsupported,
    Modality,
)
from preprocess.fetch import Fetcher, redirect_target

LIMITS = FetchLimits(max_bytes=10_000, timeout_s=2.0, max_redirects=3, allow_private_addresses=True)
CONTENT = b"\x89PNG" + bytes(range(256)) * 8


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Site:
    """A server with one path per behaviour: every public coroutine below is a path of its name."""

    base: str = ""
    hits: dict[str, int] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str) -> str:
        return f"{self.base}{path}"

    def routes(self) -> dict[str, Handler]:
        return {f"/{name}": getattr(self, name) for name, kind in vars(Site).items() if iscoroutinefunction(kind)}

    async def plain(self, request: web.Request) -> web.StreamResponse:
        self.headers = dict(request.headers)
        return web.Response(body=CONTENT)

    async def empty(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"")

    async def forbidden(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=403, text="no bots")

    async def large(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 10_001)

    async def large_chunked(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b"x" * 1000)
        return response

    async def short(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "5000"})
        await response.prepare(request)
        await response.write(b"x" * 100)
        assert request.transport is not None
        request.transport.close()
        return response

    async def slow(self, request: web.Request) -> web.StreamResponse:
        await self.release.wait()
        return web.Response(body=CONTENT)

    async def gzipped(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(CONTENT), headers={"Content-Encoding": "gzip"})

    async def deflated(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=zlib.compress(CONTENT), headers={"Content-Encoding": "deflate"})

    async def bomb(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b"\0" * 5_000_000), headers={"Content-Encoding": "gzip"})

    async def cut_gzip(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(CONTENT)[:-10], headers={"Content-Encoding": "gzip"})

    async def brotli(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"zz", headers={"Content-Encoding": "br"})

    async def moved(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=int(request.query["status"]), headers={"Location": request.query["to"]})

    async def nowhere(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=302)

    async def loop(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": "/loop"})


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        site.hits[request.path] = site.hits.get(request.path, 0) + 1
        site.arrived.set()
        return await handler(request)

    app = web.Application(middlewares=[count])
    for path, handler in site.routes().items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    port = runner.addresses[0][1]
    site.base = f"http://127.0.0.1:{port}"
    yield site
    site.release.set()
    await runner.cleanup()


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    async with Fetcher(LIMITS) as fetcher:
        yield fetcher


def image(url: str) -> MediaSource:
    return MediaSource(Modality.IMAGE, url)


async def test_plain(site: Site, fetcher: Fetcher) -> None:
    assert await fetcher.fetch(image(site.url("/plain"))) == CONTENT
    assert "mimo-epd" in site.headers["User-Agent"]
    assert site.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("path", ["/gzipped", "/deflated"])
async def test_compressed_against_our_wish(site: Site, fetcher: Fetcher, path: str) -> None:
    assert await fetcher.fetch(image(site.url(path))) == CONTENT


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("/empty", MediaInvalid, "no bytes"),
        ("/forbidden", MediaUnreachable, "status 403"),
        ("/missing", MediaUnreachable, "status 404"),
        ("/large", MediaTooLarge, "announces 10001 bytes, allowed are 10000"),
        ("/large_chunked", MediaTooLarge, "over 10000 bytes"),
        ("/short", MediaUnreachable, "ended the transfer"),
        ("/bomb", MediaTooLarge, "over 10000 bytes"),
        ("/cut_gzip", MediaUnreachable, "ended its compressed"),
        ("/brotli", MediaUnsupported, "br"),
        ("/nowhere", MediaUnreachable, "without saying where"),
        ("/loop", MediaUnreachable, "more than 3 redirects"),
        ("/moved?status=302&to=file:///etc/passwd", MediaForbidden, "file"),
        ("/moved?status=302&to=ftp://example.com/x", MediaForbidden, "ftp"),
    ],
)
async def test_refused(site: Site, fetcher: Fetcher, path: str, error: type[MediaError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        await fetcher.fetch(image(site.url(path)))
    assert caught.value.status == error.status


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(site: Site, fetcher: Fetcher, status: int) -> None:
    assert await fetcher.fetch(image(site.url(f"/moved?status={status}&to=/plain"))) == CONTENT


async def test_overlapping_fetches_share_one_download(site: Site, fetcher: Fetcher) -> None:
    waiting = [asyncio.create_task(fetcher.fetch(image(site.url("/slow")))) for _ in range(5)]
    await site.arrived.wait()
    waiting[0].cancel()
    site.release.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [CONTENT] * 4
    assert site.hits["/slow"] == 1
    await fetcher.fetch(image(site.url("/slow")))
    assert site.hits["/slow"] == 2


async def test_a_fetch_nobody_waits_for_is_dropped(site: Site, fetcher: Fetcher) -> None:
    only = asyncio.create_task(fetcher.fetch(image(site.url("/slow"))))
    await site.arrived.wait()
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    site.release.set()
    assert await fetcher.fetch(image(site.url("/slow"))) == CONTENT
    assert site.hits["/slow"] == 2


async def test_private_addresses_are_refused_by_default(site: Site) -> None:
    async with Fetcher(replace(LIMITS, allow_private_addresses=False)) as fetcher:
        for host in (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "2130706433",
            "0x7f.1",
            "169.254.169.254",
            "1２7.0.0.1",
            "①②⑦.⓪.⓪.①",
        ):
            with pytest.raises(MediaForbidden):
                await fetcher.fetch(image(f"http://{host}:8080/plain"))
    assert site.hits == {}


async def test_a_name_that_changes_its_answer_is_dialled_where_it_was_checked(site: Site) -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        # Public the first time it is asked, loopback ever after.
        return ["192.88.99.1"] if len(asked) > 1 else ["127.0.0.1"]

    port = site.base.rpartition(":")[2]
    async with Fetcher(LIMITS, lookup=rebinding) as fetcher:
        assert await fetcher.fetch(image(f"http://rebind.example:{port}/plain")) == CONTENT
    assert asked == ["rebind.example"]


async def test_a_name_at_a_private_address_is_refused(site: Site) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["10.0.0.7"]

    async with Fetcher(replace(LIMITS, allow_private_addresses=False), lookup=lookup) as fetcher:
        with pytest.raises(MediaForbidden, match=r"inside\.example"):
            await fetcher.fetch(image("http://inside.example/x"))


@pytest.mark.parametrize(
    ("at", "location", "target"),
    [
        ("http://a.example/x/y", "../z", "http://a.example/z"),
        ("http://a.example/x", "https://b.example/#top", "https://b.example/"),
        ("https://a.example/x", "/y", "https://a.example/y"),
        ("https://a.example/x", "//b.example/y", "https://b.example/y"),
        ("https://a.example/x", "  https://b.example:8443/y\n", "https://b.example:8443/y"),
    ],
)
def test_redirect_targets(at: str, location: str, target: str) -> None:
    assert str(redirect_target(URL(at), location)) == target


def test_no_redirect_from_https_to_http() -> None:
    with pytest.raises(MediaForbidden, match="https: to http:"):
        redirect_target(URL("https://a.example/x"), "http://a.example/x")


async def test_https_on_a_port_that_speaks_http(site: Site, fetcher: Fetcher) -> None:
    with pytest.raises(MediaUnreachable, match=r"127\.0\.0\.1"):
        await fetcher.fetch(image(site.url("/plain").replace("http:", "https:")))
    assert site.hits == {}


async def test_unreachable_hosts(fetcher: Fetcher) -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with pytest.raises(MediaUnreachable, match=r"cannot connect to 127\.0\.0\.1: Connection refused$"):
        await fetcher.fetch(image("http://127.0.0.1:1/x"))
    async with Fetcher(LIMITS, lookup=unknown) as lost:
        with pytest.raises(MediaUnreachable, match="does not resolve"):
            await lost.fetch(image("http://nowhere.example/x"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.com/x", "'ftp' is not known"),
        ("picture.png", "is not known"),
        ("", "is not known"),
        ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ", r"not known.*write base64 as data:image/png;base64,\.\.\.$"),
        ("/9j/4AAQSkZJRgABAQ==", r"write base64 as data:image/png;base64,\.\.\.$"),
        ("some/folder/picture-of-a-very-long-name.png", "data and file$"),
        ("http://", "no host"),
        ("http://[1:2", "malformed"),
        ("http://user:secret@example.com/", "user name or password"),
        ("http://example.com:99999/", "malformed"),
    ],
)
async def test_malformed_urls(fetcher: Fetcher, url: str, words: str) -> None:
    with pytest.raises(MediaInvalid, match=words):
        await fetcher.fetch(image(url))


async def test_a_fetcher_that_is_not_open_says_why() -> None:
    fetcher = Fetcher(LIMITS)
    with pytest.raises(RuntimeError, match="was not started"):
        await fetcher.fetch(image("http://127.0.0.1:1/x"))
    async with fetcher:
        pass
    with pytest.raises(RuntimeError, match="is closed"):
        await fetcher.fetch(image("http://127.0.0.1:1/x"))


async def test_data_and_file_urls(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    encoded = base64.b64encode(CONTENT * 4).decode()
    async with Fetcher(replace(LIMITS, media_roots=(tmp_path,), max_bytes=1_000_000)) as fetcher:
        assert await fetcher.fetch(image(f"file://{tmp_path}/a.bin")) == CONTENT
        assert await fetcher.fetch(image(f"data:image/png;base64,{encoded}")) == CONTENT * 4
        large = base64.b64encode(b"x" * 400_000).decode()
        assert await fetcher.fetch(image(f"data:;base64,{large}")) == b"x" * 400_000
        with pytest.raises(MediaInvalid, match="no bytes"):
            await fetcher.fetch(image("data:;base64,"))
