"""The contract both transports keep. `Endpoint` is a worker's side, synchronous; `Channel` is the gateway's, asyncio.

Neither ever blocks on a peer that is gone: a send either hands the message to the transport or raises.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from encoder.wire import TensorFrame
from epd.types import FromWorker, ToWorker

Message = ToWorker | FromWorker


class TransportError(Exception):
    """Base of what can go wrong between two processes."""


class PeerUnreachable(TransportError):
    """A worker's message could not be handed over: the peer is gone, or has stopped reading."""


class WorkerDown(TransportError):
    """The gateway has no connection to the worker, or the worker has stopped reading."""


class ChannelClosed(TransportError):
    """This side closed the channel while someone was still waiting on it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a reply goes. Hashable; equal for every message of one connection, and for its reconnections.

    `identity` is a routing id; `address` is set instead when the peer is a worker that this one connected to.
    """

    identity: bytes
    address: str | None = None

    def __str__(self) -> str:
        return self.address if self.address is not None else self.identity.hex()


@dataclass(frozen=True, slots=True)
class Received:
    peer: Peer
    message: Message
    tensors: tuple[TensorFrame, ...] = ()


class Endpoint(Protocol):
    """A worker's mailbox. One thread uses it, except for `wake`, which any thread or signal handler may call."""

    @property
    def address(self) -> str: ...

    @property
    def num_dropped(self) -> int:
        """Messages that were not ours to understand: logged and dropped."""
        ...

    def receive(self, timeout_s: float) -> list[Received]:
        """Everything that has arrived; waits up to `timeout_s` for the first message, 0 only looks."""
        ...

    def send(self, peer: Peer, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        """Raises PeerUnreachable. The tensors' memory must stay as it is: it may be read after the return."""
        ...

    def connect(self, address: str) -> None:
        """Open the connection to another worker early, so that a later `send_to` finds it ready. Never waits."""
        ...

    def send_to(self, address: str, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        """Send to the worker at `address`. Raises PeerUnreachable; a first connection is given a moment to come up."""
        ...

    def wake(self) -> None:
        """Make a `receive` that waits return now, perhaps with nothing."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """The gateway's connection to one worker. It reconnects by itself; `send` raises WorkerDown meanwhile.

    A message that was handed over but not delivered when the connection broke is lost, never given to the next process.
    So is, over sockets, one that arrived and was not received by then.
    """

    on_disconnect: Callable[[], None] | None
    on_connect: Callable[[], None] | None

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    @property
    def is_refused(self) -> bool:
        """The worker is there and does not let this side in."""
        ...

    @property
    def is_silent(self) -> bool:
        """The worker's host takes connections, and the worker says nothing on them."""
        ...

    def open(self) -> None:
        """Start connecting; call inside the running asyncio loop."""
        ...

    def send(self, message: ToWorker, tensors: Sequence[TensorFrame] = ()) -> Awaitable[None]: ...

    def receive(self) -> Awaitable[tuple[FromWorker, tuple[TensorFrame, ...]]]:
        """The next message; malformed ones are logged and skipped. Raises ChannelClosed after `close`."""
        ...

    def wait_connected(self) -> Awaitable[None]: ...

    def wait_disconnected(self) -> Awaitable[None]: ...

    def close(self) -> None: ...
