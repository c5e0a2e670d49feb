"""Where the local store's entries go: from the hot shelf to the cold one when room is needed, back when they are used.

    put -> hot --oldest segment--> cold --oldest segment--> gone
            ^----------used-----------'

Both shelves lose their oldest segment first; what is used is added anew to the hot one before its turn comes, so what
goes was not used for long. A demotion copies what is alive and not on the cold shelf already, a piece at a time; only
its end holds the store's lock: entries that died meanwhile die in the copy, too, and the copy gets its name before the
original loses its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from epd.cache.l3.catalogue import Catalogue
from epd.cache.l3.segment import Entry, Scratch, Segment, entry_bytes
from epd.cache.l3.shelf import Shelf

__all__ = ["Mover"]

logger = logging.getLogger(__name__)

_STEP_BYTES: Final = 1 << 20


class Mover:
    """Of one process; every process moves what nobody else is moving or writing."""

    def __init__(self, catalogue: Catalogue, counters: Counter[str]) -> None:
        self._catalogue = catalogue
        self._counters = counters
        self._demotion: _Demotion | None = None
        self._has_complained = False

    def is_moving(self, segment: Segment | None = None) -> bool:
        """Whether a demotion has begun: of this segment, if one is given."""
        return self._demotion is not None and segment in (None, self._demotion.source)

    def begin(self, spared: Segment | None) -> bool:
        """Under the store's lock: choose a segment to demote, but not the spared one, and make room for it.

        False when there is none, or nowhere to put it. Raises OSError.
        """
        cold = self._catalogue.cold
        if self._demotion is None and cold is not None:
            segment = self._choose(spared)
            if segment is None:
                return False
            cold.sweep()
            while cold.measure() + segment.tail > cold.max_bytes:
                if not self._evict_cold():
                    segment.unlock()
                    return False
            try:
                self._demotion = _Demotion(segment, self._catalogue, cold)
            except OSError as error:
                self._complain(error)
                raise
        return self._demotion is not None

    def step(self) -> bool:
        """Copy a little; True when only `finish` is left to do. Raises OSError."""
        if self._demotion is None:
            return True
        try:
            return self._demotion.step()
        except OSError as error:
            self._complain(error)
            self.abandon()
            raise

    def finish(self) -> None:
        """Under the store's lock: end the demotion that was begun. Raises OSError."""
        demotion, self._demotion = self._demotion, None
        if demotion is not None:
            self._finish(demotion)

    def make_room(self, spared: Segment | None) -> bool:
        """Under the store's lock: take one segment off the hot shelf. False when all are in use. Raises OSError."""
        if self._catalogue.cold is not None:
            for _ in range(2):
                try:
                    if not self.begin(spared):
                        break
                    while not self.step():
                        pass
                    self.finish()
                    return True
                except OSError:
                    if not self._evict_cold():
                        break
        segment = self._choose(spared)
        if segment is None:
            return False
        self._evict(self._catalogue.hot, segment)
        return True

    def abandon(self) -> None:
        """Leave the segment where it is."""
        if self._demotion is not None:
            self._demotion.abandon()
            self._demotion = None

    def _choose(self, spared: Segment | None) -> Segment | None:
        """The oldest of the hot shelf that nobody else writes or moves, locked."""
        for segment in self._catalogue.hot.by_age():
            if segment is not spared and segment.lock():
                if segment.is_linked:
                    # Its writer may have added something before it let go.
                    self._catalogue.scan(segment)
                    return segment
                segment.unlock()
        return None

    def _finish(self, demotion: _Demotion) -> None:
        hot, cold = self._catalogue.hot, self._catalogue.cold
        assert cold is not None
        copies = demotion.copies
        if not demotion.source.is_linked:
            # The store was cleared.
            demotion.abandon()
            return
        try:
            if copies:
                demotion.settle()
                cold.show(demotion.target)
                self._catalogue.opened(demotion.target)
        except OSError as error:
            self._complain(error)
            demotion.abandon()
            raise
        for key, _, copy in copies:
            if demotion.target.is_alive(copy):
                self._catalogue.add(key, copy)
        if not copies:
            demotion.discard_target()
        self._counters["demoted"] += len(copies)
        hot.remove(demotion.source)
        self._catalogue.drop(demotion.source)

    def _evict_cold(self) -> bool:
        cold = self._catalogue.cold
        if cold is None:
            return False
        # Others may have filled it.
        self._catalogue.refresh()
        oldest = next(iter(cold.by_age()), None)
        if oldest is None:
            return False
        self._evict(cold, oldest)
        return True

    def _evict(self, shelf: Shelf, segment: Segment) -> None:
        shelf.remove(segment)
        self._counters["evicted"] += self._catalogue.drop(segment)

    def _complain(self, error: OSError) -> None:
        self._counters["failed_demotions"] += 1
        if not self._has_complained:
            logger.warning("the local KV store cannot write to its directory, and lets go of more: %s", error)
            self._has_complained = True


class _Demotion:
    """A copy of one hot segment in the making."""

    def __init__(self, source: Segment, catalogue: Catalogue, cold: Shelf) -> None:
        """`source` is locked. Raises OSError, and it is locked no more."""
        self.source = source
        self.copies: list[tuple[bytes, Entry, Entry]] = []
        self._catalogue = catalogue
        self._scratch = Scratch()
        self._left = list(reversed(source.entries))
        self._old_before_ns = cold.old_before_ns
        try:
            # As large as it may become: so much of the shelf is taken from now on.
            self.target = cold.make(source.tail)
        except OSError:
            source.unlock()
            raise

    def step(self) -> bool:
        copied_bytes = 0
        while self._left and copied_bytes < _STEP_BYTES:
            key, entry = self._left.pop()
            if not self._is_wanted(key, entry):
                continue
            value = self.source.read(key, entry, self._scratch)
            if value is not None:
                copied_bytes += entry_bytes(key, entry.value_bytes)
                self.copies.append((key, entry, self.target.append([(key, [value], entry.stamp)])[0]))
        return not self._left

    def settle(self) -> None:
        """Under the store's lock: the copy is as dead as the original, and no larger than it need be."""
        self.target.seal()
        for _, entry, copy in self.copies:
            if not self.source.is_alive(entry):
                self.target.kill(copy)

    def abandon(self) -> None:
        self.discard_target()
        self.source.unlock()

    def discard_target(self) -> None:
        self.target.path.unlink(missing_ok=True)
        self.target.close()

    def _is_wanted(self, key: bytes, entry: Entry) -> bool:
        places = self._catalogue.places(key)
        if entry not in places:
            return False
        return not any(place.segment.created_ns >= self._old_before_ns for place in places if not place.segment.is_hot)
