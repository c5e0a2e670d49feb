"""The body of a request on its way in: what may be sent, how large, how fast, and how much of it is held at once.

A body needs no place among the requests in flight until it is whole, so slow clients keep nobody out.
"""

import asyncio
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from epd.errors import BodyTimeout, BodyTooLarge, InvalidRequest, Overloaded, UnsupportedMediaType

# Bodies up to this size are never counted: what all sockets together can hold of them is small.
SMALL_BODY_BYTES = 64 << 10

# What a client must keep up on average after its first `timeout_s`.
_LEAST_BYTES_PER_S = 256 << 10


@dataclass(eq=False, slots=True)
class _Arrival:
    """One body being read."""

    limit: asyncio.Timeout
    size_bytes: int = 0
    evicted: bool = False


class BodyReader:
    """Reads bodies of at most `max_bytes`. All that are being read hold at most twice that, small ones not counted.

    When they would hold more, the largest is refused. A client that sends nothing for `timeout_s` is, too.
    """

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._arrivals: set[_Arrival] = set()

    async def read(self, request: web.Request) -> bytearray:
        """Raises UnsupportedMediaType and BodyTooLarge from the headers alone, BodyTooLarge, BodyTimeout, Overloaded
        and InvalidRequest while reading."""
        self._check_headers(request)
        body = bytearray()
        loop = asyncio.get_running_loop()
        latest_s = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(latest_s) as limit:
                arrival = _Arrival(limit)
                self._arrivals.add(arrival)
                try:
                    while chunk := await request.content.readany():
                        body += chunk
                        self._grew(arrival, len(body))
                        allowed_s = latest_s + len(body) / _LEAST_BYTES_PER_S
                        if not arrival.evicted:
                            limit.reschedule(min(loop.time() + self._timeout_s, allowed_s))
                finally:
                    self._arrivals.discard(arrival)
        except TimeoutError as error:
            if arrival.evicted:
                raise Overloaded("too many large requests are arriving at once", retry_after_s=5.0) from error
            raise BodyTimeout(f"the body came too slowly; {len(body)} bytes had arrived") from error
        except (BadHttpMessage, web.RequestPayloadError) as error:
            raise InvalidRequest(f"the body is not framed as its headers say, after {len(body)} bytes") from error
        return body

    def _check_headers(self, request: web.Request) -> None:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise UnsupportedMediaType(
                f"Content-Encoding is {encoding[:80]}; allowed: identity", param="Content-Encoding"
            )
        # Also what makes a browser ask first (CORS) before a foreign page may post to a server on this machine.
        if request.content_type != "application/json" or "Content-Type" not in request.headers:
            given = request.headers.get("Content-Type", "absent")
            raise UnsupportedMediaType(f"Content-Type is {given[:80]}; allowed: application/json", param="Content-Type")
        charset = (request.charset or "utf-8").lower()
        if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
            raise UnsupportedMediaType(f"charset is {charset[:80]}; allowed: utf-8", param="Content-Type")
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large(f"{request.content_length} bytes")

    def _grew(self, arrival: _Arrival, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise self._too_large(f"more than {self._max_bytes} bytes")
        arrival.size_bytes = size_bytes
        large = [other for other in self._arrivals if other.size_bytes > SMALL_BODY_BYTES and not other.limit.expired()]
        if sum(other.size_bytes for other in large if not other.evicted) > 2 * self._max_bytes:
            largest = max(large, key=lambda other: other.size_bytes)
            largest.evicted = True
            largest.limit.reschedule(asyncio.get_running_loop().time())

    def _too_large(self, what: str) -> BodyTooLarge:
        return BodyTooLarge(f"the body has {what}; allowed: {self._max_bytes} (gateway.max_body_bytes)")
