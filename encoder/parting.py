"""How a process that has drained ends without losing an answer.

A socket that loses its connection throws away what it has received and nobody has read yet. So a server does not simply
go once its last answer is sent: it says `Farewell` and goes when the peer says `Goodbye`. Messages keep their order, so
by then the peer has read every answer, and the server every request that the peer sent before it knew.

    server  -- answers, Farewell 1 -->  peer
    server  <-- request that crossed it, Goodbye 1 --  peer       the request is refused, so once more:
    server  -- refusal, Farewell 2 -->  peer
    server  <-- Goodbye 2 --  peer                                now all is said
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

PeerT = TypeVar("PeerT", bound=Hashable)

# Only a send tells a server that a peer is gone, so an unanswered farewell is said again.
REPEAT_S = 1.0


class Partings(Generic[PeerT]):
    """Which peers may still have something to read. Never waits, sends nothing itself."""

    def __init__(self) -> None:
        # The farewell that followed the last answer; None while it is still to be said.
        self._farewells: dict[PeerT, int | None] = {}
        self._last_sequence = 0

    @property
    def is_over(self) -> bool:
        """Everything that was said has been read."""
        return not self._farewells

    def spoke(self, peer: PeerT) -> None:
        """Something that must not be lost was sent to `peer`."""
        self._farewells[peer] = None

    def take_due(self, *, again: bool = False) -> list[tuple[PeerT, int]]:
        """The peers to whom a `Farewell` must be sent now, each with its number; `again` includes unanswered ones."""
        due = []
        for peer, sequence in self._farewells.items():
            if sequence is None or again:
                self._last_sequence += 1
                self._farewells[peer] = self._last_sequence
                due.append((peer, self._last_sequence))
        return due

    def answered(self, peer: PeerT, sequence: int) -> None:
        """A `Goodbye` came. One that answers an earlier farewell than the last proves nothing."""
        if self._farewells.get(peer) == sequence:
            del self._farewells[peer]

    def forget(self, peer: PeerT) -> None:
        """The peer is gone: it reads nothing any more."""
        self._farewells.pop(peer, None)
