"""What the local store holds, as one process knows it: each key's entries, found by reading the fronts of all files.

Every process has its own, and looks after what the others did before each call: one `stat` for each directory, and one
short read for each segment that somebody may be adding to.

A key has several entries when it was promoted or demoted (equal stamps, equal values: the hot one is read), or was put
again (the highest stamp counts; the others are shadows, which are to be killed before anything can bring them back).
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import OrderedDict
from typing import Final

from epd.cache.l3.deaths import Deaths
from epd.cache.l3.segment import Entry, Segment
from epd.cache.l3.shelf import Shelf

__all__ = ["Catalogue"]

_MAX_LOOKS: Final = 8
_MAX_OPEN_COLD: Final = 256


class Catalogue:
    """Of the hot shelf and, unless there is none, the cold one."""

    def __init__(self, hot: Shelf, cold: Shelf | None, deaths: Deaths | None = None) -> None:
        """`deaths`, opened before, is where others tell of theirs."""
        self.hot = hot
        self.cold = cold
        self._deaths = deaths
        self.shadows: list[tuple[bytes, Entry]] = []
        self._places: dict[bytes, tuple[Entry, ...]] = {}
        self._growing: list[Segment] = []
        self._open_cold: OrderedDict[Segment, None] = OrderedDict()
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._places)

    def places(self, key: bytes) -> tuple[Entry, ...]:
        """Where its value lies, the best place first."""
        return self._places.get(key, ())

    def next_stamp(self) -> int:
        """Higher than all that this process has seen or given."""
        self._stamp = max(time.time_ns(), self._stamp + 1)
        return self._stamp

    def refresh(self) -> None:
        """Learn what others did. Raises OSError, FileNotFoundError among others when a directory is gone."""
        for _ in range(_MAX_LOOKS):
            # In this order: what moves is on the cold shelf before it leaves the hot one.
            hot_names = self.hot.look()
            cold_names = None if self.cold is None else self.cold.look()
            is_complete = self._attach(self.hot, hot_names)
            if self.cold is not None:
                is_complete &= self._attach(self.cold, cold_names)
            if is_complete:
                break
            # It moved, or went, between the look and the opening.
            self.hot.look_anew()
            if self.cold is not None:
                self.cold.look_anew()
        for shelf, names in ((self.hot, hot_names), (self.cold, cold_names)):
            if shelf is not None and names is not None:
                for name in shelf.segments.keys() - names:
                    self.drop(shelf.segments.pop(name))
        for segment in list(self._growing):
            self.scan(segment)
        if self._deaths is not None:
            self._bury(self._deaths.news())

    def add(self, key: bytes, entry: Entry) -> None:
        """A live entry."""
        self._stamp = max(self._stamp, entry.stamp)
        known = self._places.get(key)
        if known is None:
            self._places[key] = (entry,)
        elif entry.stamp > known[0].stamp:
            self.shadows.extend((key, old) for old in known)
            self._places[key] = (entry,)
        elif entry.stamp < known[0].stamp:
            self.shadows.append((key, entry))
        elif entry not in known:
            self._places[key] = (entry, *known) if entry.segment.is_hot else (*known, entry)

    def forget(self, key: bytes, entry: Entry) -> bool:
        """An entry that is dead or gone. True when the key has no other."""
        known = self._places.get(key)
        if known is None or entry not in known:
            return False
        rest = tuple(other for other in known if other is not entry and other != entry)
        if rest:
            self._places[key] = rest
            return False
        del self._places[key]
        return True

    def drop(self, segment: Segment) -> int:
        """A segment that is gone from its shelf; how many keys went with it."""
        num_gone = sum(self.forget(key, entry) for key, entry in segment.entries)
        if self.shadows:
            self.shadows = [(key, entry) for key, entry in self.shadows if entry.segment is not segment]
        if segment in self._growing:
            self._growing.remove(segment)
        self._open_cold.pop(segment, None)
        segment.close()
        return num_gone

    def own(self, segment: Segment) -> None:
        """This process adds to it now: nothing to be learned from it."""
        if segment in self._growing:
            self._growing.remove(segment)

    def release(self, segment: Segment) -> None:
        """Another process may add to it from now on."""
        if segment not in self._growing:
            self._growing.append(segment)

    def opened(self, segment: Segment) -> None:
        """It is about to be read; of cold segments only so many stay open."""
        if segment.is_hot:
            return
        self._open_cold[segment] = None
        self._open_cold.move_to_end(segment)
        if len(self._open_cold) > _MAX_OPEN_COLD:
            self._open_cold.popitem(last=False)[0].close()

    def close(self) -> None:
        for shelf in (self.hot, self.cold):
            if shelf is not None:
                for segment in shelf.segments.values():
                    segment.close()
                shelf.segments.clear()
                shelf.look_anew()
        self.shadows.clear()
        self._places.clear()
        self._growing.clear()
        self._open_cold.clear()

    def _attach(self, shelf: Shelf, names: set[str] | None) -> bool:
        """Open and scan what is new. False when something was not there any more."""
        if names is None:
            return True
        is_complete = True
        for name in sorted(names - shelf.segments.keys()):
            try:
                segment = shelf.attach(name)
            except FileNotFoundError:
                is_complete = False
                continue
            if segment is not None:
                if shelf.is_hot:
                    self._growing.append(segment)
                self.opened(segment)
                self.scan(segment)
        return is_complete

    def scan(self, segment: Segment) -> None:
        """Learn what was added to it."""
        # What cannot be read is not there.
        with contextlib.suppress(OSError):
            for key, entry, is_alive in segment.scan():
                self._stamp = max(self._stamp, entry.stamp)
                if is_alive:
                    self.add(key, entry)
            if segment.is_hot and segment.size_bytes <= segment.tail and segment in self._growing:
                self._growing.remove(segment)

    def _bury(self, dead: list[tuple[bytes, int]] | None) -> None:
        if dead is None:
            self._look_at_all()
        elif dead:
            shelves = (self.hot.segments, self.cold.segments if self.cold is not None else {})
            by_uid = {segment.uid: segment for segments in shelves for segment in segments.values()}
            for uid, offset in dead:
                entries = by_uid[uid].entries if uid in by_uid else []
                index = bisect.bisect_left(entries, offset, key=lambda pair: pair[1].offset)
                if index < len(entries) and entries[index][1].offset == offset:
                    self.forget(*entries[index])

    def _look_at_all(self) -> None:
        for key, places in list(self._places.items()):
            for entry in places:
                is_alive = False
                with contextlib.suppress(OSError):
                    self.opened(entry.segment)
                    is_alive = entry.segment.is_alive(entry)
                if not is_alive:
                    self.forget(key, entry)
