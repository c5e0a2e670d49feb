"""Copies between device and host memory that say they have failed."""

from __future__ import annotations

import random

from epd.kv.copies import CopyFailed, CopyTicket, MoverStats, PageCopies
from epd.kv.stream_mover import StreamMover

__all__ = ["FaultyMover"]


class FaultyMover:
    """A mover some of whose copies do not arrive; see epd.kv.copies.PageMover."""

    def __init__(self, inner: StreamMover, rng: random.Random, chance: float) -> None:
        self._inner = inner
        self._rng = rng
        self._chance = chance

    def load(self, copies: PageCopies) -> CopyTicket:
        return self._perhaps(self._inner.load(copies), self._chance)

    def save(self, copies: PageCopies) -> CopyTicket:
        # Without saves there is nothing to load.
        return self._perhaps(self._inner.save(copies), self._chance / 4)

    def stats(self) -> MoverStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _perhaps(self, ticket: CopyTicket, chance: float) -> CopyTicket:
        return _Lost(ticket) if self._rng.random() < chance else ticket


class _Lost:
    """A copy that is at rest and did not arrive, or so it says."""

    def __init__(self, ticket: CopyTicket) -> None:
        self._ticket = ticket

    def is_done(self) -> bool:
        return self._ticket.is_done()

    def wait(self) -> None:
        self._ticket.wait()
        raise CopyFailed("a copy was lost")

    def wait_layer(self, layer_index: int) -> None:
        self.wait()
