"""Media URLs to bytes, with limits on bytes, time, redirects and addresses.

    data:          decoded in place
    file:          under the configured roots only
    http, https    checked resolver, redirects followed here and checked anew at each hop

Requests for one URL that overlap in time share one download.
"""

from __future__ import annotations

import asyncio
import zlib
from types import TracebackType
from typing import Final, Self

import aiohttp
from yarl import URL

from preprocess.addresses import CheckedResolver, Lookup, check_endpoint, system_lookup
from preprocess.config import FetchLimits
from preprocess.errors import (
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
    MediaUnreachable,
    MediaUnsupported,
)
from preprocess.local import decode_data_url, read_file_url
from preprocess.types import MediaSource

_USER_AGENT: Final = "mimo-epd/0.1 (media fetcher)"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES: Final = 1 << 16
# Decoding more base64 than this on the event loop would be felt by other requests.
_INLINE_DATA_CHARS: Final = 1 << 18


class Fetcher:
    """Owns the HTTP session. Use as `async with Fetcher(limits) as fetcher`, or call `start` and `close`."""

    def __init__(self, limits: FetchLimits, *, lookup: Lookup = system_lookup, user_agent: str = _USER_AGENT) -> None:
        self._limits = limits
        self._lookup = lookup
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._flights: dict[str, _Flight] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Opens the session; must run on the event loop that will fetch."""
        resolver = CheckedResolver(self._lookup, allow_private_addresses=self._limits.allow_private_addresses)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=self._limits.max_concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            # Asked for as it is; should a server compress regardless, `_read_body` inflates under the byte cap.
            headers={"User-Agent": self._user_agent, "Accept": "*/*", "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Cancels downloads and closes the session."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def fetch(self, source: MediaSource) -> bytes:
        """The content, at least one byte and at most `max_bytes`.

        Raises MediaInvalid, MediaForbidden, MediaUnreachable or MediaTooLarge.
        """
        # White space around a URL means nothing, as in a browser's address line.
        url = source.url.strip()
        scheme = url.partition(":")[0].lower()
        match scheme:
            case "data":
                content = await self._decode_data(url)
            case "file":
                content = await asyncio.to_thread(read_file_url, url, self._limits)
            case "http" | "https":
                content = await self._join_flight(url)
            case _:
                raise MediaInvalid(f"URL scheme {scheme[:20]!r} is not known; allowed are http, https, data and file")
        if not content:
            raise MediaInvalid(f"the {scheme}: URL holds no bytes")
        return content

    async def _decode_data(self, url: str) -> bytes:
        if len(url) <= _INLINE_DATA_CHARS:
            return decode_data_url(url, self._limits.max_bytes)
        return await asyncio.to_thread(decode_data_url, url, self._limits.max_bytes)

    async def _join_flight(self, url: str) -> bytes:
        flight = self._flights.get(url)
        if flight is None:
            flight = _Flight(asyncio.create_task(self._download(url)))
            self._flights[url] = flight
        flight.num_waiting += 1
        try:
            # Shielded: one waiter going away must not take the download from the others.
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0:
                flight.task.cancel()
            if (flight.task.done() or flight.num_waiting == 0) and self._flights.get(url) is flight:
                del self._flights[url]

    async def _download(self, text: str) -> bytes:
        url = _parse(text)
        try:
            async with asyncio.timeout(self._limits.timeout_s), self._slots:
                return await self._follow(url)
        except TimeoutError as error:
            raise MediaUnreachable(
                f"{url.host} did not deliver within {self._limits.timeout_s:g} s", timed_out=True
            ) from error
        except aiohttp.InvalidURL as error:
            raise MediaInvalid(f"the URL of {url.host} is malformed") from error
        except aiohttp.ClientConnectorDNSError as error:
            raise MediaUnreachable(f"the name {url.host} does not resolve") from error
        except aiohttp.ClientPayloadError as error:
            raise MediaUnreachable(f"{url.host} ended the transfer before all bytes had come") from error
        except (aiohttp.ClientError, OSError) as error:
            raise MediaUnreachable(f"cannot fetch from {url.host}: {error or type(error).__name__}") from error

    async def _follow(self, url: URL) -> bytes:
        if self._session is None:
            raise RuntimeError("the fetcher was not started")
        for _ in range(self._limits.max_redirects + 1):
            self._check(url)
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(url, response)
                location = response.headers.get("Location")
                if location is None:
                    raise MediaUnreachable(f"{url.host} redirects (status {response.status}) without saying where")
                url = url.join(_parse_location(location))
        raise MediaUnreachable(f"more than {self._limits.max_redirects} redirects, the last to {url.host}")

    def _check(self, url: URL) -> None:
        if url.scheme not in ("http", "https"):
            raise MediaForbidden(f"redirect to a {url.scheme}: URL is not followed")
        if not url.host or url.port is None:
            raise MediaInvalid("the URL names no host")
        if url.user is not None or url.password is not None:
            raise MediaInvalid(f"the URL of {url.host} carries a user name or password, which is not supported")
        # The encoded host is what is dialled: full-width and circled digits are ordinary ones by then.
        check_endpoint(url.raw_host or "", url.port, allow_private=self._limits.allow_private_addresses)

    async def _read(self, url: URL, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise MediaUnreachable(f"{url.host} answered with status {response.status}")
        max_bytes = self._limits.max_bytes
        if response.content_length is not None and response.content_length > max_bytes:
            raise MediaTooLarge(f"{url.host} announces {response.content_length} bytes, allowed are {max_bytes}")
        body = _body(response.headers.get("Content-Encoding", "identity"), url, max_bytes)
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body.feed(chunk)
        return body.finish()


class _Flight:
    """One download and how many requests wait for it."""

    def __init__(self, task: asyncio.Task[bytes]) -> None:
        self.task = task
        self.num_waiting = 0


class _Body:
    """Collects content under a byte cap."""

    def __init__(self, url: URL, max_bytes: int) -> None:
        self._url = url
        self._max_bytes = max_bytes
        self._content = bytearray()

    def feed(self, chunk: bytes) -> None:
        if len(self._content) + len(chunk) > self._max_bytes:
            raise MediaTooLarge(f"{self._url.host} sends over {self._max_bytes} bytes, which is the limit")
        self._content += chunk

    def finish(self) -> bytes:
        return bytes(self._content)


class _InflatingBody(_Body):
    """Inflates gzip or zlib on the way, never more than the cap at once."""

    def __init__(self, url: URL, max_bytes: int) -> None:
        super().__init__(url, max_bytes)
        self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)

    def feed(self, chunk: bytes) -> None:
        try:
            while chunk:
                super().feed(self._inflate.decompress(chunk, self._max_bytes + 1))
                chunk = self._inflate.unconsumed_tail
        except zlib.error as error:
            raise MediaUnreachable(f"{self._url.host} sends compressed content that does not inflate") from error

    def finish(self) -> bytes:
        if not self._inflate.eof:
            raise MediaUnreachable(f"{self._url.host} ended its compressed content early")
        return super().finish()


def _body(encoding: str, url: URL, max_bytes: int) -> _Body:
    match encoding.strip().lower():
        case "" | "identity":
            return _Body(url, max_bytes)
        case "gzip" | "x-gzip" | "deflate":
            return _InflatingBody(url, max_bytes)
        case _:
            raise MediaUnsupported(f"{url.host} sends content encoded as {encoding[:40]!r} although none was asked for")


def _parse(text: str) -> URL:
    try:
        url = URL(text.strip())
    except ValueError as error:
        raise MediaInvalid(f"the URL is malformed: {error}") from error
    if not url.host:
        raise MediaInvalid("the URL names no host")
    return url


def _parse_location(text: str) -> URL:
    try:
        return URL(text.strip())
    except ValueError as error:
        raise MediaUnreachable(f"redirect to a malformed URL: {error}") from error
