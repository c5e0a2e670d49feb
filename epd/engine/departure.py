"""The end of a worker that has drained: gateways read its last answers first, for so long at most."""

import logging

from encoder.parting import REPEAT_S, Partings
from encoder.types import Farewell
from epd.transport.base import Peer

logger = logging.getLogger(__name__)


class Departure:
    """Never waits, sends nothing itself. Times are monotonic seconds."""

    def __init__(self, *, timeout_s: float) -> None:
        self._partings: Partings[Peer] = Partings()
        self._timeout_s = timeout_s
        self._until_s: float | None = None
        self._said_s = 0.0

    @property
    def is_all_read(self) -> bool:
        """Everything that was said has been read."""
        return self._partings.is_over

    def spoke(self, peer: Peer) -> None:
        """Something that must not be lost was sent to `peer`."""
        self._partings.spoke(peer)

    def answered(self, peer: Peer, sequence: int) -> None:
        """A `Goodbye` came."""
        self._partings.answered(peer, sequence)

    def forget(self, peer: Peer) -> None:
        """The peer is gone."""
        self._partings.forget(peer)

    def farewells(self, now_s: float) -> list[tuple[Peer, Farewell]]:
        """What to say now to whoever has not read everything yet. The first call begins the wait."""
        if self._until_s is None:
            self._until_s = now_s + self._timeout_s
        due = self._partings.take_due(again=now_s - self._said_s >= REPEAT_S)
        if due:
            self._said_s = now_s
        return [(peer, Farewell(sequence=sequence)) for peer, sequence in due]

    def has_waited(self, now_s: float) -> bool:
        """Whether it has been long enough."""
        if self._until_s is None or now_s < self._until_s:
            return False
        logger.warning("ending, though some gateway has not said goodbye for %g s", self._timeout_s)
        return True
