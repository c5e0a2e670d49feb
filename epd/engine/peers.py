"""Which gateways are alive: a gateway that has requests here must say something every now and then.

Prefill workers send to decode workers, too, but owe them no sign of life; they are never entered.
"""

from epd.transport.base import Peer


class PeerWatch:
    """Times are monotonic seconds passed in."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s: dict[Peer, float] = {}
        self._lost_s: dict[Peer, float] = {}

    def heard(self, peer: Peer, now_s: float, *, is_new: bool) -> None:
        """A message came; `is_new` when it is one that only gateways send, which enters the peer."""
        self._lost_s.pop(peer, None)
        if is_new or peer in self._heard_s:
            self._heard_s[peer] = now_s

    def lose(self, peer: Peer, now_s: float) -> None:
        """The peer cannot be reached: it is not missed any more, and lost until it is heard again."""
        self._heard_s.pop(peer, None)
        self._lost_s[peer] = now_s

    def is_lost(self, peer: Peer) -> bool:
        return peer in self._lost_s

    def take_silent(self, now_s: float) -> list[Peer]:
        """Forget and return the peers that have been silent for longer than the timeout."""
        silent = [peer for peer, heard_s in self._heard_s.items() if now_s - heard_s > self._timeout_s]
        for peer in silent:
            del self._heard_s[peer]
        # By now nothing is left here that would still be said to them.
        for peer in [peer for peer, lost_s in self._lost_s.items() if now_s - lost_s > self._timeout_s]:
            del self._lost_s[peer]
        return silent
