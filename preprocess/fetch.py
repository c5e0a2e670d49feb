"""Media URLs to bytes, with limits on bytes, time, redirects, addresses and how much one request may do at a time.

    data:          decoded in place
    file:          under the configured roots only
    http, https    checked resolver, redirects followed here and checked anew at each hop

Requests for one URL that overlap in time share one download. Connections are kept and used again: one leads to an
address that was checked when it was opened, whatever the name's answer is by then.
"""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from collections.abc import Hashable
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from preprocess.addresses import CheckedResolver, Lookup, SystemLookup, check_endpoint
from preprocess.config import FetchLimits
from preprocess.errors import (
    MediaError,
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
    MediaUnreachable,
    unavailable,
)
from preprocess.fetch_body import open_body
from preprocess.local import decode_data_url, read_file_url
from preprocess.turns import Turn, Turns
from preprocess.types import MediaSource

_USER_AGENT: Final = "mimo-epd/0.1 (media fetcher)"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# Decoding more base64 than this on the event loop would be felt by other requests.
_INLINE_DATA_CHARS: Final = 1 << 18
# Every scheme with its colon is shorter; a data: URL may have a hundred million characters.
_SCHEME_CHARS: Final = 32
_BARE_BASE64: Final = re.compile(r"[\w+/-]{64}|[\w+/-]{32,}=*$|[\w+/-]{8,}={1,2}$", re.ASCII)


class Fetcher:
    """Owns the HTTP session. Use as `async with Fetcher(limits) as fetcher`, or call `start` and `close`."""

    def __init__(self, limits: FetchLimits, *, lookup: Lookup | None = None, user_agent: str = _USER_AGENT) -> None:
        """`lookup` instead of the system's resolver."""
        self._limits = limits
        self._lookup = lookup
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._system_lookup: SystemLookup | None = None
        self._turns = Turns(total=limits.max_concurrency, per_asker=limits.max_concurrency_per_request)
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
        lookup = self._lookup
        if lookup is None:
            lookup = self._system_lookup = SystemLookup()
        resolver = CheckedResolver(lookup, allow_private_addresses=self._limits.allow_private_addresses)
        stall_s = self._limits.stall_timeout_s
        self._closed = False
        self._session = aiohttp.ClientSession(
            connector=_Connector(resolver=resolver, use_dns_cache=False, limit=self._limits.max_concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The whole of a fetch has its own deadline, redirects included.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s),
            # Asked for as it is; should a server compress regardless, the body is inflated under the byte cap.
            headers={"User-Agent": self._user_agent, "Accept": "*/*", "Accept-Encoding": "identity"},
            auto_decompress=False,
            # No proxy and no password of the environment.
            trust_env=False,
        )

    async def close(self) -> None:
        """Ends downloads, whose waiters get MediaUnreachable, and closes the session."""
        self._closed = True
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._system_lookup is not None:
            self._system_lookup.close()
            self._system_lookup = None

    async def fetch(self, source: MediaSource, *, asker: Hashable | None = None) -> bytes:
        """The content, at least one byte and at most `max_bytes`.

        Downloads of one `asker`, a request, share its part of the slots, and askers are served in rotation; None is
        an asker of its own. Waiting for a slot has no time limit here. Raises MediaInvalid, MediaForbidden,
        MediaUnreachable, MediaUnsupported, MediaTooLarge, or DecoderUnavailable where descriptors are short here.
        """
        # White space around a URL means nothing, as in a browser's address line.
        url = source.url.strip()
        scheme, colon, _ = url[:_SCHEME_CHARS].partition(":")
        match scheme.lower() if colon else "":
            case "data":
                content = await self._decode_data(url)
            case "file":
                content = await asyncio.to_thread(read_file_url, url, self._limits)
            case "http" | "https":
                content = await self._join_flight(_parse(url), object() if asker is None else asker)
            case _:
                hint = "; write base64 as data:image/png;base64,..." if _BARE_BASE64.match(url) else ""
                raise MediaInvalid(
                    f"URL scheme {scheme[:20]!r} is not known; allowed are http, https, data and file{hint}"
                )
        if not content:
            raise MediaInvalid(f"the {scheme.lower()}: URL holds no bytes")
        return content

    async def _decode_data(self, url: str) -> bytes:
        if len(url) <= _INLINE_DATA_CHARS:
            return decode_data_url(url, self._limits.max_bytes)
        return await asyncio.to_thread(decode_data_url, url, self._limits.max_bytes)

    async def _join_flight(self, url: URL, asker: Hashable) -> bytes:
        name = str(url)
        flight = self._flights.get(name)
        if flight is None:
            if self._session is None:
                raise RuntimeError("the fetcher is closed" if self._closed else "the fetcher was not started")
            flight = self._flights[name] = _Flight(self._session, url, self._limits, self._turns)
        flight.turn.join(asker)
        try:
            # Shielded: one waiter going away must not take the download from the others.
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError as error:
            waiter = asyncio.current_task()
            if flight.task.cancelled() and waiter is not None and not waiter.cancelling():
                raise MediaUnreachable(f"the server stopped before {url.host} had delivered") from error
            raise
        finally:
            flight.turn.leave(asker)
            if not flight.turn.num_askers:
                flight.task.cancel()
            if (flight.task.done() or not flight.turn.num_askers) and self._flights.get(name) is flight:
                del self._flights[name]


class _Connector(aiohttp.TCPConnector):
    """Does not use a connection again on which something came unasked: it would pass for the next answer."""

    def __init__(self, *, resolver: CheckedResolver, use_dns_cache: bool, limit: int) -> None:
        super().__init__(resolver=resolver, use_dns_cache=use_dns_cache, limit=limit)
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if protocol is None or protocol not in self._used or not protocol.should_close:
                if protocol is not None:
                    self._used.add(protocol)
                return connection
            connection.close()


class _Flight:
    """One download, from waiting for its turn to the last byte. Its turn counts the requests that wait for it."""

    def __init__(self, session: aiohttp.ClientSession, url: URL, limits: FetchLimits, turns: Turns) -> None:
        self._session = session
        self._at = url
        """The URL being asked, after so many redirects."""
        self._limits = limits
        self.turn = Turn(turns)
        self.task = asyncio.create_task(self._run())
        # Not in the task itself: one that is cancelled before its first step never runs.
        self.task.add_done_callback(lambda _: self.turn.end())

    async def _run(self) -> bytes:
        await self.turn.wait()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._follow()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # TimeoutError, which is what a deadline raises, is an OSError.
            shortage = unavailable(error) if isinstance(error, OSError) else None
            raise shortage or self._in_words(error) from error

    async def _follow(self) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            self._check(self._at)
            async with self._session.get(self._at, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response)
                location = response.headers.get("Location")
                if location is None:
                    raise MediaUnreachable(f"{self._at.host} redirects (status {response.status}) without saying where")
                self._at = redirect_target(self._at, location)
        raise MediaUnreachable(f"more than {self._limits.max_redirects} redirects, the last to {self._at.host}")

    def _check(self, url: URL) -> None:
        if url.scheme not in ("http", "https"):
            raise MediaForbidden(f"redirect to a {url.scheme}: URL is not followed")
        if not url.host or url.port is None:
            raise MediaInvalid("the URL names no host")
        if url.user is not None or url.password is not None:
            raise MediaInvalid(f"the URL of {url.host} carries a user name or password, which is not supported")
        # The encoded host is what is dialled: full-width and circled digits are ordinary ones by then.
        check_endpoint(url.raw_host or "", url.port, allow_private=self._limits.allow_private_addresses)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        host, max_bytes = self._at.host or "", self._limits.max_bytes
        if response.status not in (HTTPStatus.OK, HTTPStatus.NON_AUTHORITATIVE_INFORMATION):
            raise MediaUnreachable(f"{host} answered with status {_status_in_words(response.status)}")
        if response.content_length is not None and response.content_length > max_bytes:
            raise MediaTooLarge(f"{host} announces {response.content_length} bytes, allowed are {max_bytes}")
        # Content-Type is not looked at: it is wrong too often, and the content says what it is.
        body = open_body(response.headers.get("Content-Encoding", ""), host=host, max_bytes=max_bytes)
        _watch_for_end(response)
        async for chunk in response.content.iter_any():
            await body.feed(chunk)
        return body.finish()

    def _in_words(self, error: Exception) -> MediaError:
        host, limits = self._at.host, self._limits
        match error:
            case aiohttp.ConnectionTimeoutError():
                return MediaUnreachable(
                    f"{host} took no connection within {limits.stall_timeout_s:g} s", timed_out=True
                )
            case aiohttp.SocketTimeoutError():
                return MediaUnreachable(f"{host} sent nothing for {limits.stall_timeout_s:g} s", timed_out=True)
            case TimeoutError():
                return MediaUnreachable(f"{host} did not deliver within {limits.timeout_s:g} s", timed_out=True)
            case aiohttp.InvalidURL():
                return MediaInvalid(f"the URL of {host} is malformed")
            case aiohttp.ClientConnectorDNSError():
                return MediaUnreachable(f"the name {host} does not resolve")
            case aiohttp.ClientConnectorCertificateError():
                return MediaUnreachable(f"{host} shows a certificate that is not valid for it")
            case aiohttp.ClientConnectorError():
                # The error's own words name the address, which is the business of nobody outside.
                why = os.strerror(error.errno) if error.errno else "no address answers"
                return MediaUnreachable(f"cannot connect to {host}: {why}")
            case aiohttp.ClientPayloadError():
                return MediaUnreachable(f"{host} ended the transfer before all bytes had come")
            case aiohttp.ServerDisconnectedError():
                return MediaUnreachable(f"{host} closed the connection without an answer")
            case aiohttp.ClientOSError():
                return MediaUnreachable(f"the connection to {host} broke off")
            case aiohttp.ClientResponseError():
                return MediaUnreachable(
                    f"{host} answers with something that is not HTTP, or with more than it announced"
                )
            case _:
                return MediaUnreachable(f"cannot fetch from {host}: {type(error).__name__}")


def _watch_for_end(response: aiohttp.ClientResponse) -> None:
    """Ends the body with its connection. The library tells no reader of a body that turns out malformed in its middle.

    That is a chunk without a size, for example: the connection is closed, and who reads would wait until its deadline.
    """
    content, connection = response.content, response.connection
    closed = None if connection is None or connection.protocol is None else connection.protocol.closed
    if closed is None:
        return

    def ended(closed: asyncio.Future[None]) -> None:
        # Looked at, so that nobody reports it as unseen.
        error = closed.exception()
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError(f"the connection ended before the body: {error}"))

    closed.add_done_callback(ended)


def redirect_target(at: URL, location: str) -> URL:
    """Where an answer of `at` with this Location leads; its scheme, host and port are yet to be checked.

    Raises MediaUnreachable for a target that is no URL, MediaForbidden for the step from https: to http:, which would
    put in the open what was asked for in private.
    """
    try:
        target = _checked_host(at.join(URL(location.strip())).with_fragment(None))
    except ValueError as error:
        raise MediaUnreachable(f"{at.host} redirects to a malformed URL: {error}") from error
    if at.scheme == "https" and target.scheme == "http":
        raise MediaForbidden(f"{at.host} redirects from https: to http:, which is not followed")
    return target


def _status_in_words(status: int) -> str:
    try:
        return f"{status} ({HTTPStatus(status).phrase})"
    except ValueError:
        return str(status)


def _parse(text: str) -> URL:
    """A fragment is for whoever looks at the content: URLs that differ in it alone are one."""
    try:
        url = _checked_host(URL(text).with_fragment(None))
    except ValueError as error:
        raise MediaInvalid(f"the URL is malformed: {error}") from error
    if not url.host:
        raise MediaInvalid("the URL names no host")
    return url


def _checked_host(url: URL) -> URL:
    """The URL. Raises ValueError for an encoded host that does not decode, which yarl tells on first use."""
    _ = url.host
    return url
