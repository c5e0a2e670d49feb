"""Messages to receivers, over ZeroMQ PUSH sockets. The reader binds, this side connects.

Sockets to scheduler ranks are kept, with the messages of one endpoint in order; one that fails is closed and made anew
for the next message. Nobody waits for another endpoint's receiver. Frames are not copied: ZeroMQ reads the memory they
are in, and `Hold` says when it has.

A message is handed to a connection only once its other end has shaken hands as a receiver does. ZeroMQ takes whatever
else talks first, an HTTP or SSH server, for a peer of its own first version, which has no handshake, and would send.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import SOCK_STREAM
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from encoder.sglang.errors import ReceiverUnreachable
from encoder.sglang.message import Hold
from encoder.wire import Buffer

logger = logging.getLogger(__name__)

_LINGER_MS: Final = 5000
# ZeroMQ says that memory is free without a way to wait for it on a loop: it is asked, soon at first.
_FIRST_LOOK_S: Final = 0.0005
_LOOK_S: Final = 0.02
# A socket that is closed at once gives back memory within milliseconds.
_GIVE_BACK_S: Final = 5.0
_IDLE_S: Final = 300.0
_LAST_S: Final = 1.0
# A line takes three: its own, and both ends of what tells of its connection.
_MAX_SOCKETS: Final = 3 * 8192
_REFUSALS: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
# The other end hung up meanwhile: it may be going down, or find that this is no business of its own.
_HANG_UP: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_BEFORE_PARTING: Final = (zmq.EVENT_HANDSHAKE_SUCCEEDED, _HANG_UP)
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANG_UP | _REFUSALS[0] | _REFUSALS[1]
# ZeroMQ tries again every 0.1 s.
_MAX_HANG_UPS: Final = 5


class _Line:
    """One socket, to one endpoint."""

    def __init__(self, socket: zmq.asyncio.Socket, news: zmq.asyncio.Socket, endpoint: str) -> None:
        """`news` is where the events of the connection are read. Both sockets end with the line."""
        self.socket = socket
        self.endpoint = endpoint
        self._news = news
        self._latest_event = 0
        self.order = asyncio.Lock()
        self.num_users = 0
        self.used_s = time.monotonic()
        self.is_broken = False

    async def greet(self) -> None:
        """Returns when the connection of this moment is one to a receiver. Raises ReceiverUnreachable for another."""
        num_hang_ups = 0
        # Looked at before it is taken: a look that is cancelled loses nothing.
        while await self._news.poll(0 if self._latest_event == zmq.EVENT_HANDSHAKE_SUCCEEDED else None):
            event = parse_monitor_message(await self._news.recv_multipart(zmq.NOBLOCK))["event"]
            num_hang_ups += event == _HANG_UP
            # Disconnected without a word of how: by ZeroMQ here, which understood nothing, and tries no more.
            is_foreign = event == zmq.EVENT_DISCONNECTED and self._latest_event not in _BEFORE_PARTING
            if event in _REFUSALS or is_foreign or num_hang_ups == _MAX_HANG_UPS:
                raise ReceiverUnreachable(f"what listens at {self.endpoint} is no receiver: ZeroMQ's handshake failed")
            self._latest_event = event

    def end(self, linger_ms: int) -> None:
        if not self.socket.closed:
            # In this order: ZeroMQ would wait for somebody to read its news.
            self.socket.disable_monitor()
            self._news.close(linger=0)
            self.socket.close(linger=linger_ms)


@dataclass(slots=True, eq=False)
class _Parcel:
    """One message, and whether ZeroMQ has it."""

    line: _Line
    frames: Sequence[Buffer]
    connect_timeout_s: float
    is_queued: bool = False


class Post:
    """All sockets of one process. Use on one event loop, and `close` it."""

    def __init__(self, *, send_timeout_s: float, connect_timeout_s: float) -> None:
        self._send_timeout_s = send_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = _MAX_SOCKETS
        self._num_made = 0
        self._lines: dict[str, _Line] = {}
        self._carrying: set[asyncio.Task[None]] = set()

    @property
    def num_kept(self) -> int:
        """Sockets that are open for later messages."""
        return len(self._lines)

    @property
    def num_on_their_way(self) -> int:
        """Messages that the network does not have yet."""
        return len(self._carrying)

    async def push(
        self,
        endpoint: str,
        frames: Sequence[Buffer],
        hold: Hold,
        *,
        is_shared: bool,
        connect_timeout_s: float | None = None,
    ) -> None:
        """Returns when the network has the whole message. Raises ReceiverUnreachable.

        `hold` is taken until nothing reads the frames any more, also when the caller is cancelled. `is_shared` keeps
        the socket. `connect_timeout_s` shortens the configured one.
        """
        patience_s = min(self._connect_timeout_s, connect_timeout_s or self._connect_timeout_s)
        line = self._line(await _resolved(endpoint, patience_s), is_shared=is_shared)
        line.num_users += 1
        parcel = _Parcel(line, frames, patience_s)
        drop = hold.take()
        carrying = asyncio.create_task(self._carry(parcel))
        self._carrying.add(carrying)

        def ended(task: "asyncio.Task[None]") -> None:
            # In a callback: a task that is cancelled before its first step runs nothing of its own.
            self._carrying.discard(task)
            line.num_users -= 1
            line.used_s = time.monotonic()
            if not is_shared:
                line.end(_LINGER_MS if parcel.is_queued else 0)
            drop()
            if not task.cancelled():
                # Seen, whether or not anybody still waits.
                task.exception()

        carrying.add_done_callback(ended)
        try:
            await asyncio.shield(carrying)
        except asyncio.CancelledError:
            # What ZeroMQ has, it sends; the memory is held until then.
            if not parcel.is_queued:
                carrying.cancel()
            raise

    def sweep(self) -> None:
        """Close sockets that have had nothing to do for minutes."""
        now_s = time.monotonic()
        for endpoint, line in list(self._lines.items()):
            if not line.num_users and now_s - line.used_s > _IDLE_S:
                del self._lines[endpoint]
                line.end(_LINGER_MS)

    async def close(self) -> None:
        """Close all sockets; what is on its way has a second more."""
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=_LAST_S)
        for line in self._lines.values():
            line.end(0)
        self._lines.clear()
        for carrying in self._carrying:
            carrying.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        # Waits for what lingers.
        await asyncio.to_thread(self._context.destroy, 0)

    def _line(self, endpoint: str, *, is_shared: bool) -> _Line:
        line = self._lines.get(endpoint) if is_shared else None
        if line is None:
            line = self._connected(endpoint)
            if is_shared:
                self._lines[endpoint] = line
        return line

    def _connected(self, endpoint: str) -> _Line:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.linger = _LINGER_MS
        # Messages queue on connections that exist: a receiver that is not there is an error, not a growing queue.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.IPV6, 0 if _is_ipv4(endpoint) else 1)
        news = self._context.socket(zmq.PAIR)
        # ZeroMQ's own thread would wait where there is no room.
        news.rcvhwm = 0
        line = _Line(socket, news, endpoint)
        self._num_made += 1
        try:
            socket.monitor(f"inproc://news-{self._num_made}", _EVENTS)
            news.connect(f"inproc://news-{self._num_made}")
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            line.end(0)
            raise ReceiverUnreachable(f"the receiver at {endpoint} cannot be reached: {error}") from error
        return line

    async def _carry(self, parcel: _Parcel) -> None:
        """Raises ReceiverUnreachable, with the memory free by then as well."""
        line = parcel.line
        try:
            async with asyncio.timeout(parcel.connect_timeout_s), line.order:
                tracker = await self._queue(parcel)
        except TimeoutError as error:
            self._break(line)
            raise ReceiverUnreachable(
                f"the receiver at {line.endpoint} took no connection within {parcel.connect_timeout_s:g} s, with the "
                "handshake that ZeroMQ has"
            ) from error
        except ReceiverUnreachable:
            self._break(line)
            raise
        except zmq.ZMQError as error:
            self._break(line)
            raise ReceiverUnreachable(f"the receiver at {line.endpoint} cannot be reached: {error}") from error
        if not await _is_done(tracker, self._send_timeout_s, lambda: line.is_broken):
            self._break(line)
        if not line.is_broken:
            return
        # The closed socket lets go of its messages. One of them may have gone out just before; nobody can tell.
        if not await _is_done(tracker, _GIVE_BACK_S, lambda: False):
            logger.error("ZeroMQ still reads an embedding for %s after its socket was closed", line.endpoint)
        raise ReceiverUnreachable(f"the receiver at {line.endpoint} stopped reading")

    async def _queue(self, parcel: _Parcel) -> zmq.MessageTracker:
        """Hand the message to ZeroMQ as soon as there is a connection."""
        line = parcel.line
        if not line.is_broken:
            try:
                await line.greet()
            except asyncio.CancelledError:
                # By whoever broke the line, or by the caller.
                if not line.is_broken:
                    raise
        if line.is_broken:
            raise ReceiverUnreachable(f"the receiver at {line.endpoint} took no connection")
        # A future by then, not a coroutine: what it came to is seen even where waiting for it was cancelled.
        sending = asyncio.ensure_future(line.socket.send_multipart(parcel.frames, copy=False, track=True))
        try:
            await sending
        except asyncio.CancelledError:
            # Cancelled in the very moment it was queued: then it is queued, and must be watched.
            if not sending.done() or sending.cancelled():
                raise
        tracker = sending.result()
        assert tracker is not None, "tracking was asked for"
        parcel.is_queued = True
        return tracker

    def _break(self, line: _Line) -> None:
        line.is_broken = True
        if self._lines.get(line.endpoint) is line:
            del self._lines[line.endpoint]
        line.end(0)


async def _is_done(tracker: zmq.MessageTracker, timeout_s: float, is_over: Callable[[], bool]) -> bool:
    """Whether ZeroMQ has let go of the frames, looked at until `timeout_s` or until it `is_over`."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_LOOK_S
    while not tracker.done:
        if is_over() or time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)
    return True


async def _resolved(endpoint: str, timeout_s: float) -> str:
    """The endpoint by address. ZeroMQ would look a name up itself, and everybody's messages would wait meanwhile."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith("[") or _is_ipv4(endpoint):
        return endpoint
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=SOCK_STREAM)
    except OSError as error:
        # A TimeoutError is one.
        raise ReceiverUnreachable(f"the name of the receiver at {endpoint} does not resolve") from error
    address = str(found[0][4][0])
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _is_ipv4(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False
