"""ZMQ transport: a ROUTER per worker, a DEALER for everyone who talks to it.

Every DEALER sets ZMQ_IMMEDIATE: nothing is queued for a process that is not there, and what was queued when it died
dies with it, so a restarted worker never sees the requests of its predecessor. The price: what has arrived and was not
read yet dies as well, so a worker that ends by itself parts from its gateways first (`encoder.parting`). Every ROUTER
sets MANDATORY (an unknown peer is an error, not silence) and HANDOVER (a peer that reconnects keeps its identity). All
lingers are 0.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from encoder.wire import Buffer, Codec, TensorFrame
from epd.transport.base import ChannelClosed, Message, Peer, PeerUnreachable, Received, WorkerDown
from epd.transport.codec import from_worker_codec, to_worker_codec
from epd.types import FromWorker, ToWorker

logger = logging.getLogger(__name__)

# Messages, not bytes: a peer that leaves this many unread is treated as gone.
_HIGH_WATER = 8192
_TRANSFER_HIGH_WATER = 64
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 1000
# Only these notice a host that vanished, so tcp has them; a killed process is noticed at once. On one machine they
# could only mistake a busy peer for a dead one.
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
# Of connections to other workers: one over which nothing was sent for so long is closed (workers come and go, and have
# other addresses then), and one that fails is opened anew when it is this old.
_DEALER_IDLE_S = 600.0
_DEALER_STALE_S = 10.0
# KV of one layer of a prompt of a million tokens. A peer that announces more is disconnected before that is taken.
_MAX_FRAME_BYTES = 2 << 30
# Below this many bytes a copy is cheaper than handing the buffer over.
_COPY_BELOW_BYTES = 64 << 10


def _harden(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", address: str, high_water: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    limit(socket, max_frame_bytes=_MAX_FRAME_BYTES)
    if address.startswith("tcp:"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _as_dealer(
    socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", address: str, high_water: int, keys: ClusterKeys | None
) -> None:
    _harden(socket, address, high_water)
    secure_client(socket, address, keys)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.ROUTING_ID, b"c" + uuid.uuid4().bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)


@dataclass(slots=True)
class _Dealer:
    socket: "zmq.Socket[bytes]"
    opened_s: float
    used_s: float
    failing_since_s: float | None = None


class WorkerEndpoint:
    """A worker's bound ROUTER and the DEALERs to the workers it sends to. Binds at once or raises zmq.ZMQError."""

    def __init__(
        self,
        address: str,
        *,
        advertise: str | None = None,
        keys: ClusterKeys | None = None,
        connect_grace_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`advertise` is where others reach what is bound at `address`, None for there; its port may be `*`."""
        self._clock = clock
        self._connect_grace_s = connect_grace_s
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        _harden(self._router, address, _HIGH_WATER)
        secure_server(self._router, address, keys)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._to_worker = to_worker_codec()
        self._from_worker = from_worker_codec()
        self._dealers: dict[str, _Dealer] = {}
        self._num_dropped = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        try:
            self._router.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        # tcp://127.0.0.1:* becomes the port that was chosen.
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._address = bound if advertise is None else advertise.replace(":*", f":{bound.rpartition(':')[2]}")

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_connections(self) -> int:
        """To other workers."""
        return len(self._dealers)

    def receive(self, timeout_s: float) -> list[Received]:
        ready = dict(self._poller.poll(timeout=max(0, round(timeout_s * 1000))))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        received: list[Received] = []
        if self._router in ready:
            self._drain_router(received)
        for address, dealer in self._dealers.items():
            if dealer.socket in ready:
                self._drain_dealer(address, dealer.socket, received)
        return received

    def send(self, peer: Peer, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        if peer.address is not None:
            self.send_to(peer.address, message, tensors)
            return
        try:
            _send(self._router, [peer.identity, *self._from_worker.encode(message, tensors)])
        except zmq.ZMQError as error:
            raise PeerUnreachable(f"peer {peer} cannot be reached: {error}") from error

    def connect(self, address: str) -> None:
        now_s = self._clock()
        if address in self._dealers:
            self._dealers[address].used_s = now_s
            return
        for other in [other for other, dealer in self._dealers.items() if now_s - dealer.used_s > _DEALER_IDLE_S]:
            self._disconnect(other)
        socket = self._context.socket(zmq.DEALER)
        _as_dealer(socket, address, _TRANSFER_HIGH_WATER, self._keys)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        self._dealers[address] = _Dealer(socket, now_s, now_s)

    def send_to(self, address: str, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        try:
            self.connect(address)
            dealer = self._dealers[address]
            # Only a connection that is still coming up is waited for; one that broke is reported at once.
            grace_s = dealer.opened_s + self._connect_grace_s - self._clock()
            if grace_s > 0:
                dealer.socket.poll(round(grace_s * 1000), zmq.POLLOUT)
            _send(dealer.socket, self._to_worker.encode(message, tensors))
            dealer.failing_since_s = None
        except zmq.ZMQError as error:
            self._failed(address)
            raise PeerUnreachable(f"worker at {address} cannot be reached: {error}") from error

    def wake(self) -> None:
        # A full pipe means a wake is already pending; a closed one that nobody waits any more.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def close(self, *, flush_s: float = 0.0) -> None:
        """Close every socket; what is not delivered within `flush_s` is dropped. May be called twice."""
        if self._context.closed:
            return
        flush_ms = round(flush_s * 1000)
        for dealer in self._dealers.values():
            dealer.socket.close(flush_ms)
        self._router.close(flush_ms)
        self._context.destroy(linger=flush_ms)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _failed(self, address: str) -> None:
        dealer, now_s = self._dealers.get(address), self._clock()
        if dealer is None:
            return
        if dealer.failing_since_s is None:
            dealer.failing_since_s = now_s
        elif now_s - dealer.failing_since_s > _DEALER_STALE_S:
            self._disconnect(address)

    def _disconnect(self, address: str) -> None:
        socket = self._dealers.pop(address).socket
        self._poller.unregister(socket)
        socket.close(0)

    def _drain_router(self, received: list[Received]) -> None:
        while (frames := _receive(self._router)) is not None:
            identity, *rest = frames
            self._decode(self._to_worker, Peer(bytes(identity)), rest, received)

    def _drain_dealer(self, address: str, socket: "zmq.Socket[bytes]", received: list[Received]) -> None:
        while (frames := _receive(socket)) is not None:
            self._decode(self._from_worker, Peer(b"", address), frames, received)

    def _decode(
        self, codec: "Codec[ToWorker] | Codec[FromWorker]", peer: Peer, frames: list[Buffer], received: list[Received]
    ) -> None:
        try:
            message, tensors = codec.decode(frames)
        except WireError as error:
            self._num_dropped += 1
            logger.warning("dropped a malformed message of peer %s: %s", peer, error)
            return
        received.append(Received(peer, message, tuple(tensors)))


class WorkerChannel:
    """The gateway's DEALER to one worker, with a socket monitor that reports a lost connection within milliseconds."""

    def __init__(
        self,
        address: str,
        *,
        context: zmq.asyncio.Context | None = None,
        keys: ClusterKeys | None = None,
        on_connect: Callable[[], None] | None = None,
        on_disconnect: Callable[[], None] | None = None,
    ) -> None:
        self.on_connect = on_connect
        self.on_disconnect = on_disconnect
        self._address = address
        self._keys = keys
        self._handshakes = Handshakes(address)
        self._owns_context = context is None
        self._context = zmq.asyncio.Context() if context is None else context
        self._socket: zmq.asyncio.Socket | None = None
        self._watch: asyncio.Task[None] | None = None
        self._to_worker = to_worker_codec()
        self._from_worker = from_worker_codec()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()

    @property
    def address(self) -> str:
        return self._address

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    @property
    def is_refused(self) -> bool:
        """The worker is there and does not let this process in."""
        return self._handshakes.is_refused

    @property
    def is_silent(self) -> bool:
        """The worker's host takes the connection, and the worker says nothing on it."""
        return self._handshakes.is_silent

    def open(self) -> None:
        if self._socket is not None:
            return
        self._socket = self._context.socket(zmq.DEALER)
        _as_dealer(self._socket, self._address, _HIGH_WATER, self._keys)
        monitor = self._socket.get_monitor_socket(CLIENT_EVENTS)
        self._watch = asyncio.get_running_loop().create_task(self._follow(monitor), name=f"monitor {self._address}")
        self._socket.connect(self._address)

    async def send(self, message: ToWorker, tensors: Sequence[TensorFrame] = ()) -> None:
        if self._socket is None or not self.connected:
            raise WorkerDown(f"no connection to the worker at {self._address}")
        frames = self._to_worker.encode(message, tensors)
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=not tensors)
        except zmq.ZMQError as error:
            raise WorkerDown(f"worker at {self._address} takes no messages: {error}") from error

    async def receive(self) -> tuple[FromWorker, tuple[TensorFrame, ...]]:
        while True:
            if self._socket is None:
                raise ChannelClosed(f"channel to {self._address} is closed")
            try:
                frames = await self._socket.recv_multipart()
            except (zmq.ZMQError, asyncio.CancelledError) as error:
                # pyzmq cancels what waits on a socket that is closed; a cancelled task stays cancelled.
                task = asyncio.current_task()
                if self._socket is not None or (task is not None and task.cancelling()):
                    raise
                raise ChannelClosed(f"channel to {self._address} is closed") from error
            try:
                message, tensors = self._from_worker.decode(frames)
            except WireError as error:
                logger.warning("dropped a malformed message of worker %s: %s", self._address, error)
                continue
            return message, tuple(tensors)

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def wait_disconnected(self) -> None:
        await self._down.wait()

    def close(self) -> None:
        """Close the socket; who waits in `receive` gets ChannelClosed. May be called twice."""
        if self._socket is None:
            if self._owns_context:
                self._context.destroy(linger=0)
            return
        socket, self._socket = self._socket, None
        if self._watch is not None:
            self._watch.cancel()
        self._up.clear()
        self._down.set()
        socket.disable_monitor()
        socket.close(0)
        if self._owns_context:
            self._context.destroy(linger=0)

    async def _follow(self, monitor: zmq.asyncio.Socket) -> None:
        try:
            while True:
                event = parse_monitor_message(await monitor.recv_multipart())["event"]
                must_retry = self._handshakes.take(event)
                if self._handshakes.is_up:
                    self._turn(self._up, self._down, self.on_connect)
                else:
                    self._turn(self._down, self._up, self.on_disconnect)
                if must_retry and self._socket is not None:
                    await asyncio.sleep(RETRY_S)
                    reconnect(self._socket, self._address)
        finally:
            monitor.close(0)

    def _turn(self, now: asyncio.Event, before: asyncio.Event, notify: Callable[[], None] | None) -> None:
        if now.is_set():
            return
        now.set()
        before.clear()
        if notify is not None:
            notify()


def _send(socket: "zmq.Socket[bytes]", frames: list[Buffer]) -> None:
    """One multipart message, never waiting. Raises zmq.ZMQError (EAGAIN at the high-water mark, EHOSTUNREACH)."""
    large = any(memoryview(frame).nbytes >= _COPY_BELOW_BYTES for frame in frames)
    socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=not large)


def _receive(socket: "zmq.Socket[bytes]") -> list[Buffer] | None:
    """The frames of one waiting message, or None. Large frames alias ZMQ's memory."""
    try:
        frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return [frame.buffer if len(frame) >= _COPY_BELOW_BYTES else frame.bytes for frame in frames]
