"""Server-sent events: one `data:` line of JSON per event, `[DONE]` at the end of a whole answer."""

import json
from typing import Any

from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies that buffer would turn a stream into one late block.
    "X-Accel-Buffering": "no",
}

ANSWER_HEADERS: web.RequestKey[dict[str, str]] = web.RequestKey("answer_headers", dict)
"""Headers that every answer to a request carries."""


class EventStream:
    """Writes events to one client. Opened by the first event, so that what fails before it still has its own status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def response(self) -> web.StreamResponse | None:
        """None until the first event."""
        return self._response

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(json.dumps(event, ensure_ascii=False, separators=(",", ":")))

    async def finish(self) -> web.StreamResponse:
        """The mark after the last event of a whole answer."""
        await self._write("[DONE]")
        return await self.close()

    async def close(self) -> web.StreamResponse:
        """End the stream; without `finish` before it, the client knows that something is missing."""
        response = await self._opened()
        await response.write_eof()
        return response

    async def _write(self, data: str) -> None:
        response = await self._opened()
        await response.write(f"data: {data}\n\n".encode())

    async def _opened(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers=HEADERS | self._request[ANSWER_HEADERS])
            await self._response.prepare(self._request)
        return self._response


STREAM: web.RequestKey[EventStream] = web.RequestKey("stream", EventStream)
"""Of a request that is answered by a stream: what goes wrong from there on is told as its last event."""
