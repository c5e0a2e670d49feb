"""A worker's endpoint as two lists, so that a test can step an engine by hand."""

from collections.abc import Sequence

from encoder.types import Farewell, Goodbye
from encoder.wire import TensorFrame
from epd.transport.base import Message, Peer, PeerUnreachable, Received

GATEWAY = Peer(b"gateway")


class Mailbox:
    """What the test puts into `inbox` is received next; what the engine sends is in `sent`. Linked ones reach each
    other.

    Peers and addresses in `unreachable` refuse messages. A farewell is answered at once.
    """

    def __init__(self, address: str = "worker", links: "dict[str, Mailbox] | None" = None) -> None:
        self.inbox: list[Received] = []
        self.sent: list[tuple[Peer, Message]] = []
        self.unreachable: set[Peer | str] = set()
        self.num_dropped = 0
        self._address = address
        self._links = {} if links is None else links
        self._links[address] = self

    @property
    def address(self) -> str:
        return self._address

    def put(self, message: Message, *, peer: Peer = GATEWAY, tensors: Sequence[TensorFrame] = ()) -> None:
        self.inbox.append(Received(peer, message, tuple(tensors)))

    def take(self) -> list[Message]:
        """What was sent to anyone since the last look."""
        messages = [message for _, message in self.sent]
        self.sent.clear()
        return messages

    def receive(self, timeout_s: float) -> list[Received]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, peer: Peer, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        if peer.address is not None:
            self.send_to(peer.address, message, tensors)
        elif peer in self.unreachable:
            raise PeerUnreachable(f"peer {peer} is gone")
        else:
            self.sent.append((peer, message))
            if isinstance(message, Farewell):
                self.put(Goodbye(sequence=message.sequence), peer=peer)

    def connect(self, address: str) -> None:
        pass

    def send_to(self, address: str, message: Message, tensors: Sequence[TensorFrame] = ()) -> None:
        if address in self.unreachable or address not in self._links:
            raise PeerUnreachable(f"worker at {address} is gone")
        self._links[address].put(message, peer=Peer(b"", self._address), tensors=tensors)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass
