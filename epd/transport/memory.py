"""The in-process twin of the ZMQ transport: same contract, messages passed as objects.

One `MemoryNetwork` stands for one machine's addresses. An endpoint lives in an engine thread, a channel on the asyncio
loop of the gateway; deliveries to a channel go through `call_soon_threadsafe`.
"""

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from encoder.wire import TensorFrame
from epd.transport.base import ChannelClosed, Message, Peer, PeerUnreachable, Received, WorkerDown
from epd.types import FromWorker, ToWorker


class MemoryNetwork:
    """Names to endpoints. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[str, MemoryEndpoint] = {}
        self._channels: dict[str, list[MemoryChannel]] = {}

    def endpoint(self, address: str) -> "MemoryEndpoint":
        """Bind a worker. Raises ValueError when the address is taken."""
        with self._lock:
            if address in self._endpoints:
                raise ValueError(f"address {address} is already bound")
            endpoint = MemoryEndpoint(self, address)
            self._endpoints[address] = endpoint
            waiting = list(self._channels.get(address, ()))
        for channel in waiting:
            channel.attach(endpoint)
        return endpoint

    def channel(
        self,
        address: str,
        *,
        on_connect: Callable[[], None] | None = None,
        on_disconnect: Callable[[], None] | None = None,
    ) -> "MemoryChannel":
        """The gateway's side; like a socket, it may be opened before the worker is there."""
        return MemoryChannel(self, address, on_connect=on_connect, on_disconnect=on_disconnect)

    def find(self, address: str) -> "MemoryEndpoint | None":
        with self._lock:
            return self._endpoints.get(address)

    def subscribe(self, channel: "MemoryChannel") -> "MemoryEndpoint | None":
        with self._lock:
            self._channels.setdefault(channel.address, []).append(channel)
            return self._endpoints.get(channel.address)

    def unsubscribe(self, channel: "MemoryChannel") -> None:
        with self._lock:
            channels = self._channels.get(channel.address, [])
            if channel in channels:
                channels.remove(channel)

    def unbind(self, endpoint: "MemoryEndpoint") -> None:
        with self._lock:
            if self._endpoints.get(endpoint.address) is not endpoint:
                return
            del self._endpoints[endpoint.address]
            attached = list(self._channels.get(endpoint.address, ()))
        for channel in attached:
            channel.detach()


class MemoryEndpoint:
    """A worker's mailbox in this process; see `epd.transport.base.Endpoint`."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._arrived = threading.Condition()
        self._inbox: deque[Received] = deque()
        self._woken = False
        self._closed = False
        self._channels: dict[bytes, MemoryChannel] = {}

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_dropped(self) -> int:
        return 0

    def receive(self, timeout_s: float) -> list[Received]:
        with self._arrived:
            if not self._inbox and not self._woken and timeout_s > 0:
                self._arrived.wait(timeout_s)
            self._woken = False
            received = list(self._inbox)
            self._inbox.clear()
            return received

    def send(self, peer: Peer, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        if peer.address is not None:
            self.send_to(peer.address, message, tensors)
            return
        with self._arrived:
            channel = self._channels.get(peer.identity)
        if channel is None or not isinstance(message, FromWorker) or not channel.deliver(message, tuple(tensors)):
            raise PeerUnreachable(f"peer {peer} cannot be reached: it is not connected")

    def connect(self, address: str) -> None:
        """Nothing to open in one process."""

    def send_to(self, address: str, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        target = self._network.find(address)
        if target is None or not target.put(Received(Peer(b"", self._address), message, tuple(tensors))):
            raise PeerUnreachable(f"worker at {address} cannot be reached: it is not there")

    def wake(self) -> None:
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._inbox.clear()
        self._network.unbind(self)

    def put(self, received: Received) -> bool:
        """Deliver to this endpoint; False when it is closed."""
        with self._arrived:
            if self._closed:
                return False
            self._inbox.append(received)
            self._arrived.notify()
            return True

    def register(self, identity: bytes, channel: "MemoryChannel") -> None:
        with self._arrived:
            self._channels[identity] = channel

    def forget(self, identity: bytes) -> None:
        with self._arrived:
            self._channels.pop(identity, None)


class MemoryChannel:
    """The gateway's side in this process; see `epd.transport.base.Channel`."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        *,
        on_connect: Callable[[], None] | None,
        on_disconnect: Callable[[], None] | None,
    ) -> None:
        self.on_connect = on_connect
        self.on_disconnect = on_disconnect
        self._network = network
        self._address = address
        self._identity = b"c" + uuid.uuid4().bytes
        self._endpoint: MemoryEndpoint | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: asyncio.Queue[tuple[FromWorker, tuple[TensorFrame, ...]] | None] = asyncio.Queue()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()

    @property
    def address(self) -> str:
        return self._address

    @property
    def is_refused(self) -> bool:
        return False

    @property
    def is_silent(self) -> bool:
        return False

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    def open(self) -> None:
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        endpoint = self._network.subscribe(self)
        if endpoint is not None:
            self._attached(endpoint)

    async def send(self, message: ToWorker, tensors: Sequence[TensorFrame] = ()) -> None:
        endpoint = self._endpoint
        if endpoint is None or not endpoint.put(Received(Peer(self._identity), message, tuple(tensors))):
            raise WorkerDown(f"no connection to the worker at {self._address}")

    async def receive(self) -> tuple[FromWorker, tuple[TensorFrame, ...]]:
        item = await self._inbox.get()
        if item is None:
            self._inbox.put_nowait(None)
            raise ChannelClosed(f"channel to {self._address} is closed")
        return item

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def wait_disconnected(self) -> None:
        await self._down.wait()

    def close(self) -> None:
        if self._loop is None:
            return
        self._network.unsubscribe(self)
        if self._endpoint is not None:
            self._endpoint.forget(self._identity)
        self._endpoint = None
        self._loop = None
        self._up.clear()
        self._down.set()
        self._inbox.put_nowait(None)

    def deliver(self, message: FromWorker, tensors: tuple[TensorFrame, ...]) -> bool:
        """From the engine's thread; False when this side is closed."""
        return self._call(lambda: self._inbox.put_nowait((message, tensors)))

    def attach(self, endpoint: MemoryEndpoint) -> None:
        """From the thread that bound the address: the worker is (again) there."""
        self._call(lambda: self._attached(endpoint))

    def detach(self) -> None:
        """From the thread that closed the endpoint."""
        self._call(self._detached)

    def _call(self, action: Callable[[], None]) -> bool:
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:
            # The loop closed between the two lines: the gateway is gone.
            return False
        return True

    def _attached(self, endpoint: MemoryEndpoint) -> None:
        if self._loop is None or self._endpoint is endpoint:
            return
        endpoint.register(self._identity, self)
        self._endpoint = endpoint
        self._down.clear()
        self._up.set()
        if self.on_connect is not None:
            self.on_connect()

    def _detached(self) -> None:
        if self._endpoint is None:
            return
        self._endpoint = None
        self._up.clear()
        self._down.set()
        if self.on_disconnect is not None:
            self.on_disconnect()
