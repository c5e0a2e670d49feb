"""How messages reach an encoder: over ZMQ (ROUTER and DEALER) or, in one process, straight into `EncoderServer.handle`.

`Link` is the client's side of one replica. It never blocks on a peer that is gone: `send` queues or raises LinkDown,
and what was queued when the connection broke is dropped, so that a restarted encoder never sees requests of before.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from encoder.cluster import (
    CLIENT_EVENTS,
    RETRY_S,
    ClusterKeys,
    Handshakes,
    limit,
    reconnect,
    secure_client,
    secure_server,
)
from encoder.errors import WireError
from encoder.parting import REPEAT_S, Partings
from encoder.types import EncodeFailure, EncodeReply, Farewell, FromEncoder, Goodbye, ReleaseLeases, Rows, ToEncoder
from encoder.wire import Buffer, Codec, TensorFrame

logger = logging.getLogger(__name__)

Received = tuple[FromEncoder, Sequence[TensorFrame]]
# Messages, not bytes: a peer that leaves this many unread counts as gone.
HIGH_WATER = 8192
RECONNECT_MS = 20
RECONNECT_MAX_MS = 1000
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 4000
# A peer that lives is back sooner: it tries again every second, and says which leases it holds. Until then they stand,
# since it may be reading rows under them.
ABSENCE_S = 15.0
# How long a server that has drained waits until its peers have read the last replies.
PARTING_S = 5.0


class LinkDown(Exception):
    """No connection to the replica."""


class Link(Protocol):
    """A client's connection to one replica. `on_change` is called on the loop whenever `connected` has changed."""

    on_change: Callable[[], None] | None

    @property
    def name(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    @property
    def is_silent(self) -> bool:
        """The replica's host takes connections, and the replica says nothing on them."""
        ...

    def open(self) -> None:
        """Start to connect; inside a running loop."""
        ...

    def send(self, message: ToEncoder, tensors: Sequence[TensorFrame] = ()) -> None:
        """Hand a message over without waiting. Raises LinkDown."""
        ...

    async def receive(self) -> Received:
        """The next message of the replica."""
        ...

    def close(self) -> None: ...


class Handler(Protocol):
    """What a transport needs of an encoder server."""

    def handle(
        self,
        message: ToEncoder,
        tensors: Sequence[TensorFrame],
        reply: Callable[[FromEncoder, Sequence[TensorFrame]], None],
        *,
        peer: str = "local",
    ) -> None: ...

    def end_requests(self, peer: str) -> None:
        """The peer cannot be reached at present."""
        ...

    def disconnect(self, peer: str) -> None:
        """The peer is gone for good."""
        ...


class MemoryLink:
    """A link to a server in the same process and on the same loop."""

    def __init__(self, name: str, server: Handler) -> None:
        self.on_change: Callable[[], None] | None = None
        self._name = name
        self._peer = f"memory-{uuid.uuid4().hex}"
        self._server = server
        self._replies: asyncio.Queue[Received] = asyncio.Queue()
        self._is_open = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def connected(self) -> bool:
        return self._is_open

    @property
    def is_silent(self) -> bool:
        return False

    def open(self) -> None:
        self._is_open = True
        if self.on_change is not None:
            self.on_change()

    def send(self, message: ToEncoder, tensors: Sequence[TensorFrame] = ()) -> None:
        if not self._is_open:
            raise LinkDown(f"the link to {self._name} is closed")
        self._server.handle(message, tensors, self._reply, peer=self._peer)

    async def receive(self) -> Received:
        return await self._replies.get()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._server.disconnect(self._peer)

    def _reply(self, message: FromEncoder, tensors: Sequence[TensorFrame]) -> None:
        self._replies.put_nowait((message, tensors))


class ZmqLink:
    """A DEALER to one replica, with a socket monitor that reports a broken connection within milliseconds."""

    def __init__(self, address: str, context: zmq.asyncio.Context, *, keys: ClusterKeys | None = None) -> None:
        self.on_change: Callable[[], None] | None = None
        self._address = address
        self._keys = keys
        self._handshakes = Handshakes(address)
        self._context = context
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._connected = False
        self._outbox: asyncio.Queue[list[Buffer]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._codec: Codec[FromEncoder] = Codec(FromEncoder)

    @property
    def name(self) -> str:
        return self._address

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def is_silent(self) -> bool:
        return self._handshakes.is_silent

    def open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        _harden(self._socket)
        secure_client(self._socket, self._address, self._keys)
        # Nothing is queued for a process that is not there, and what was queued for it dies with it.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.ROUTING_ID, b"e" + uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._monitor = self._socket.get_monitor_socket(CLIENT_EVENTS)
        following = self._follow(self._socket, self._monitor)
        self._tasks = [asyncio.create_task(following), asyncio.create_task(self._write(self._socket))]
        self._socket.connect(self._address)

    def send(self, message: ToEncoder, tensors: Sequence[TensorFrame] = ()) -> None:
        if not self._connected:
            raise LinkDown(f"no connection to the encoder at {self._address}")
        self._outbox.put_nowait(self._codec.encode(message, tensors))

    async def receive(self) -> Received:
        if self._socket is None:
            raise LinkDown(f"the link to {self._address} was not opened")
        while True:
            frames = await self._socket.recv_multipart()
            try:
                return self._codec.decode(frames)
            except WireError as error:
                logger.warning("dropped a malformed message of the encoder at %s: %s", self._address, error)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._connected = False
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(0)
            self._socket = None
        if self._monitor is not None:
            self._monitor.close(0)
            self._monitor = None

    async def _write(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await self._outbox.get()
            if self._connected:
                # A send that fails was meant for a connection that is breaking; the monitor tells everyone who waits.
                with contextlib.suppress(zmq.ZMQError):
                    await socket.send_multipart(frames)

    async def _follow(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            must_retry = self._handshakes.take(event)
            if self._handshakes.is_up != self._connected:
                self._turn(self._handshakes.is_up)
            if must_retry:
                await asyncio.sleep(RETRY_S)
                reconnect(socket, self._address)

    def _turn(self, connected: bool) -> None:
        self._connected = connected
        while not connected and not self._outbox.empty():
            self._outbox.get_nowait()
        if self.on_change is not None:
            self.on_change()


class ZmqEndpoint:
    """An encoder's ROUTER: decodes messages for the server and sends its replies. Binds at once or raises ZMQError."""

    def __init__(
        self, address: str, server: Handler, context: zmq.asyncio.Context, *, keys: ClusterKeys | None = None
    ) -> None:
        self._server = server
        self._codec: Codec[ToEncoder] = Codec(ToEncoder)
        self._outbox: asyncio.Queue[tuple[bytes, FromEncoder, list[Buffer]]] = asyncio.Queue()
        self._partings: Partings[bytes] = Partings()
        self._partings_changed = asyncio.Event()
        self._absent: dict[bytes, asyncio.TimerHandle] = {}
        self._socket = context.socket(zmq.ROUTER)
        _harden(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        secure_server(self._socket, address, keys)
        self.tasks: list[asyncio.Task[None]] = []
        """What `start` began. None of them ends before `stop`; one that does has failed."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address bound, with the port chosen for `tcp://host:*`."""

    def start(self) -> None:
        """Begin to read and write, inside a running loop."""
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def stop(self) -> None:
        """Send what is queued, wait until the peers have read it, close. The server must be draining.

        Until then requests are still read, so that the server refuses what crossed the farewell.
        """
        if self.tasks:
            try:
                await asyncio.wait_for(self._part(), PARTING_S)
            except TimeoutError:
                logger.warning("ending, though some peer has not said goodbye for %g s", PARTING_S)
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
        for identity in list(self._absent):
            self._is_back(identity)
        # What was handed to ZMQ gets a moment to leave the process.
        self._socket.close(200)

    async def _part(self) -> None:
        again = False
        while True:
            self._partings_changed.clear()
            for identity, sequence in self._partings.take_due(again=again):
                farewell = Farewell(sequence=sequence)
                self._outbox.put_nowait((identity, farewell, self._codec.encode(farewell)))
            if self._partings.is_over:
                return
            try:
                await asyncio.wait_for(self._partings_changed.wait(), REPEAT_S)
                again = False
            except TimeoutError:
                again = True

    async def _read(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            self._is_back(identity)
            try:
                message, tensors = self._codec.decode(frames)
            except WireError as error:
                logger.warning("dropped a malformed message of peer %s: %s", identity.hex(), error)
                continue
            if isinstance(message, Goodbye):
                self._partings.answered(identity, message.sequence)
                self._partings_changed.set()
            else:
                self._server.handle(message, tensors, self._replier(identity), peer=identity.hex())

    def _replier(self, identity: bytes) -> Callable[[FromEncoder, Sequence[TensorFrame]], None]:
        def reply(message: FromEncoder, tensors: Sequence[TensorFrame]) -> None:
            if isinstance(message, EncodeReply | EncodeFailure | Rows):
                self._partings.spoke(identity)
                self._partings_changed.set()
            self._outbox.put_nowait((identity, message, self._codec.encode(message, tensors)))

        return reply

    async def _write(self) -> None:
        while True:
            identity, message, frames = await self._outbox.get()
            try:
                await self._socket.send_multipart([identity, *frames])
            except zmq.ZMQError as error:
                # EHOSTUNREACH. What is in the reply nobody will ever hold: the request may have come on a connection
                # that was replaced by another one since.
                if isinstance(message, EncodeReply):
                    release = ReleaseLeases(lease_ids=(message.ref.lease_id,))
                    self._server.handle(release, (), self._replier(identity), peer=identity.hex())
                logger.info("peer %s cannot be reached (%s)", identity.hex(), error)
                self._server.end_requests(identity.hex())
                self._partings.forget(identity)
                self._partings_changed.set()
                if identity not in self._absent:
                    later = asyncio.get_running_loop().call_later
                    self._absent[identity] = later(ABSENCE_S, self._is_gone, identity)

    def _is_gone(self, identity: bytes) -> None:
        """With a peer that does not come back goes everyone who could release its leases."""
        del self._absent[identity]
        self._server.disconnect(identity.hex())

    def _is_back(self, identity: bytes) -> None:
        timer = self._absent.pop(identity, None)
        if timer is not None:
            timer.cancel()


def _harden(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    limit(socket)
