"""The listening socket, in a thread of its own: it answers probes itself and hands every other connection over.

    connection -- first bytes looked at, not taken --> GET /health, GET /ready: answered here, within milliseconds
                                                  '--> anything else: to the loop that works, as if just accepted

So a probe never stands behind a picture, on the same port, with no second process. All it competes for with the loop
that works is the interpreter's lock.
"""

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

from encoder.connections import IDLE_S
from encoder.front.health import Verdict

logger = logging.getLogger(__name__)

_HEAD: Final = re.compile(rb"(GET|HEAD) (/[A-Za-z_]*)(?:\?[^\s]*)? HTTP/1\.([01])\r\n(.*?)\r\n\r\n", re.DOTALL)
_BODY: Final = re.compile(rb"^(?:content-length|transfer-encoding|upgrade|expect)\s*:", re.IGNORECASE | re.MULTILINE)
_CONNECTION: Final = re.compile(rb"^connection\s*:\s*([a-z-]+)", re.IGNORECASE | re.MULTILINE)
_REQUEST_ID: Final = re.compile(rb"^x-request-id\s*:\s*([A-Za-z0-9._:-]{1,128})\s*$", re.IGNORECASE | re.MULTILINE)
_PEEK_BYTES: Final = 8192
_BACKLOG: Final = 1024
# A probe that does not take its answer.
_SEND_S: Final = 5.0
# When descriptors are short.
_ACCEPT_PAUSE_S: Final = 0.1


def open_listener(host: str, port: int) -> socket.socket:
    """Bound and not yet listening. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class Door:
    """Listens from `open` to `close`. `probes` gives the verdicts by path, and is asked from the door's thread."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        probes: Mapping[str, Callable[[], Verdict]],
        hand_over: Callable[[socket.socket], None],
        max_waiting: int = 1024,
    ) -> None:
        """`hand_over` is called from the door's thread and owns the connection from then on.

        Beyond `max_waiting` connections on which nothing was said, the one that was silent longest is closed.
        """
        self._listener = listener
        self._probes = {path.encode(): probe for path, probe in probes.items()}
        self._hand_over = hand_over
        self._max_waiting = max_waiting
        # In the order of their last words.
        self._visits: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.SelectorEventLoop()
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def is_open(self) -> bool:
        """Whether the thread runs, or is yet to be started."""
        return self._thread.ident is None or self._thread.is_alive()

    def open(self) -> None:
        """Begin to listen."""
        self._listener.listen(_BACKLOG)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end probes; waits for the thread. Connections handed over are not touched. May be called
        again."""
        with contextlib.suppress(RuntimeError):
            # The loop is closed: the thread has ended.
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            self._serving = self._loop.create_task(self._serve())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._loop.close()

    def _stop(self) -> None:
        assert self._serving is not None, "open() comes first"
        self._serving.cancel()

    async def _serve(self) -> None:
        try:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except OSError as error:
                    logger.warning("cannot accept a connection: %s", error)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                connection.setblocking(False)
                visit = self._loop.create_task(self._receive(connection))
                self._visits[visit] = None
                visit.add_done_callback(self._forget)
                if len(self._visits) > self._max_waiting:
                    oldest = next(iter(self._visits))
                    self._forget(oldest)
                    oldest.cancel()
                # Every visit has begun, and closes its connection, before anything cancels it.
                await asyncio.sleep(0)
        finally:
            visits = list(self._visits)
            for visit in visits:
                visit.cancel()
            await asyncio.gather(*visits, return_exceptions=True)

    def _forget(self, visit: asyncio.Task[None]) -> None:
        self._visits.pop(visit, None)

    async def _receive(self, connection: socket.socket) -> None:
        """Answer probes on a connection until something else comes, or nothing more."""
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    await self._readable(connection)
                seen = connection.recv(_PEEK_BYTES, socket.MSG_PEEK)
                if not seen:
                    break
                head = _HEAD.match(seen)
                probe = None if head is None or _BODY.search(head[4]) else self._probes.get(head[2])
                if head is None or probe is None:
                    self._hand_over(connection)
                    return
                connection.recv(head.end())
                stays = _stays(head)
                async with asyncio.timeout(_SEND_S):
                    await self._loop.sock_sendall(connection, _response(head, probe(), stays=stays))
                if not stays:
                    break
                visit = asyncio.current_task()
                if visit in self._visits:
                    self._visits[visit] = self._visits.pop(visit)
        except (OSError, TimeoutError):
            # Gone, or silent; nobody waits for an answer.
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            connection.close()

    async def _readable(self, connection: socket.socket) -> None:
        ready = self._loop.create_future()

        def note() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(connection, note)
        try:
            await ready
        finally:
            self._loop.remove_reader(connection)


def _stays(head: re.Match[bytes]) -> bool:
    said = _CONNECTION.search(head[4])
    word = said[1].lower() if said else b""
    return word == b"keep-alive" if head[3] == b"0" else word != b"close"


def _response(head: re.Match[bytes], verdict: Verdict, *, stays: bool) -> bytes:
    given = _REQUEST_ID.search(head[4])
    request_id = given[1].decode() if given else f"req-{uuid.uuid4().hex}"
    body = json.dumps(verdict.body).encode()
    lines = [
        f"HTTP/1.1 {verdict.status} {HTTPStatus(verdict.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {request_id}",
        "Cache-Control: no-store",
        *(["Retry-After: 1"] if verdict.status == HTTPStatus.SERVICE_UNAVAILABLE else []),
        f"Connection: {'keep-alive' if stays else 'close'}",
    ]
    text = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return text if head[1] == b"HEAD" else text + body
