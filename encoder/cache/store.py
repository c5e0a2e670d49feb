"""The embedding cache of a host as one encoder process uses it: reserve -> publish, lease -> release, eviction.

Any number of stores, in as many processes, share one arena: what one publishes all find, a lease given by one can be
ended through any other, and room made by one serves all. Room is reserved before the tower runs (the number of rows is
known from the layout), so a full arena costs no computation. The first published value of a key is its value as long
as it stays.

Every method is one short transaction, or part of the one that `together` makes. ArenaLocked when another process keeps
the arena locked for more than some milliseconds; what ends something (release, abandon) is put off then, and done with
the next transaction, before anything else.
"""

import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from encoder.cache.arena import Extent, Segment, checksum
from encoder.cache.audit import audit
from encoder.cache.holder import Process
from encoder.cache.index import Index, RowFormat
from encoder.cache.usage import StoreUsage, usage_of
from encoder.errors import ArenaFull, EmbeddingLost, EmbeddingTooLarge, EncoderBusy
from encoder.types import EmbeddingRef
from preprocess.types import MediaKey, MediaLayout

logger = logging.getLogger(__name__)

_ENCODER = msgspec.msgpack.Encoder()
_LAYOUT = msgspec.msgpack.Decoder(MediaLayout)
_WARNINGS = msgspec.msgpack.Decoder(tuple[str, ...])
# A transaction of another process takes less; a stopped one is waited for between tries, not standing still.
_BUSY_S = 0.005
_CLOSING_S = 2.0
# Of a lease's number: the clock would need centuries for more, and SQLite has no larger numbers.
_MAX_DIGITS = 18
_NO_WARNINGS = _ENCODER.encode(())


@dataclass(frozen=True, slots=True)
class Entry:
    """One published embedding, as it was at the moment of asking."""

    key: MediaKey
    extent: Extent
    layout: MediaLayout
    checksum: int
    warnings: tuple[str, ...]
    num_leases: int


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room for one embedding, to be published or abandoned exactly once. `destination` is where its bytes go."""

    key: MediaKey
    extent: Extent
    destination: memoryview
    number: int


class EmbeddingStore:
    """One process's access to an arena; several in a process are several holders. Used from one thread at a time."""

    def __init__(
        self,
        arena: str,
        *,
        holder: str,
        rows: RowFormat,
        process: Process | None = None,
        lives: Callable[[Process], bool] = lambda process: process.is_alive,
    ) -> None:
        """Open the arena `arena`. `holder` is a name nobody had before; it starts every lease id.

        `process` is who holds what this store reserves, by default this process; `lives` says whether one may still
        write there. Raises ArenaUnavailable, ArenaLocked.
        """
        self.arena = arena
        self.on_room: Callable[[], None] | None = None
        """Called whenever something can be evicted, or is free, that was not before, by this store's doing."""
        self._holder = holder
        self._rows = rows
        self._lives = lives
        self._index = Index(arena)
        self._segment = Segment(arena, page_bytes=self._index.geometry.page_bytes)
        self._put_off: list[Callable[[], object]] = []
        self._uncounted = [0, 0]
        self._index.adopt(rows)
        me = process or Process.current()
        with self._index.writing():
            self._index.run(
                "INSERT INTO holders (id, pid, started_ticks) VALUES (?, ?, ?)", (holder, me.pid, me.started_ticks)
            )
        self._index.patience_s = _BUSY_S

    def __len__(self) -> int:
        (number,) = self._index.row("SELECT count(*) FROM entries")
        return int(number)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make what the block does one transaction: all of it or, if the block raises, nothing."""
        with self._index.writing():
            put_off, self._put_off = self._put_off, []
            try:
                for act in put_off:
                    act()
                yield
            except BaseException:
                self._put_off = [*put_off, *self._put_off]
                raise

    def reserve(self, key: MediaKey, num_rows: int) -> Reservation:
        """Room for `num_rows`, evicting unleased embeddings if need be.

        Raises EmbeddingTooLarge if the arena could never hold it, ArenaFull if leases are in the way; then nothing was
        evicted.
        """
        size_bytes = num_rows * self._rows.row_bytes
        num_pages = self._segment.pages_for(size_bytes)
        if num_pages > self._segment.num_pages:
            raise EmbeddingTooLarge(
                f"the embedding of this medium needs {size_bytes} bytes, the arena has {self._segment.size_bytes}"
            )
        with self.together():
            extent = self._make_room(num_pages)
            if extent is None and self._reclaim():
                extent = self._make_room(num_pages)
            if extent is not None:
                ((number,),) = self._index.rows(
                    "INSERT INTO reservations (holder, key, start, stop) VALUES (?, ?, ?, ?) RETURNING id",
                    (self._holder, key, extent.start, extent.stop),
                )
        if extent is None:
            raise ArenaFull(
                f"no {size_bytes} bytes in one piece are free of leases", retry_after_s=1.0, needed_bytes=size_bytes
            )
        return Reservation(key, extent, self._segment.view(extent, size_bytes), number)

    def publish(
        self, reservation: Reservation, *, layout: MediaLayout, checksum: int, warnings: tuple[str, ...] = ()
    ) -> bool:
        """Make the bytes in `reservation.destination` the value of the key; ends the reservation.

        False, and the room is given back, when somebody has published the key meanwhile: the first value is the value.
        Raises EmbeddingLost when the room is no longer ours, which needs another process to take this one for dead, and
        EncoderBusy; a reservation that could not be published is still to be abandoned.
        """
        index, extent = self._index, reservation.extent
        with self.together():
            if not index.run(
                "DELETE FROM reservations WHERE id = ? AND holder = ?", (reservation.number, self._holder)
            ):
                raise EmbeddingLost(f"the room of {reservation.key} was given to another process")
            is_first = not index.rows("SELECT 1 FROM entries WHERE key = ?", (reservation.key,))
            if is_first:
                index.run(
                    "INSERT INTO entries (key, start, stop, last_use_ns, num_rows, checksum, layout, warnings) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(reservation.key, extent.start, extent.stop, index.tick_ns(), layout.num_rows),
                        *(checksum.to_bytes(8), _ENCODER.encode(layout), _ENCODER.encode(warnings)),
                    ),
                )
            else:
                index.give_pages(extent)
        reservation.destination.release()
        self._room_appeared(1)
        return is_first

    def abandon(self, reservation: Reservation) -> None:
        """Give unused room back."""
        reservation.destination.release()
        self._or_later(lambda: self._abandon(reservation))
        self._room_appeared(1)

    def lookup(self, key: MediaKey) -> Entry | None:
        found = self._index.find(
            "SELECT start, stop, num_leases, checksum, layout, warnings FROM entries WHERE key = ?", (key,)
        )
        if found is None:
            return None
        start, stop, num_leases, digest, layout, warnings = found
        return Entry(
            key=key,
            extent=Extent(start, stop),
            layout=_LAYOUT.decode(layout),
            checksum=int.from_bytes(digest),
            warnings=() if warnings == _NO_WARNINGS else _WARNINGS.decode(warnings),
            num_leases=num_leases,
        )

    def lease(self, key: MediaKey, *, owner: str, expires_s: float) -> EmbeddingRef:
        """A reference that keeps the embedding until released or expired. Raises KeyError for an unknown key."""
        index = self._index
        with self.together():
            number = index.tick_ns()
            found = index.find(
                "UPDATE entries SET num_leases = num_leases + 1, last_use_ns = ? WHERE key = ? "
                "RETURNING start, stop, num_rows, checksum",
                (number, key),
            )
            if found is None:
                raise KeyError(key)
            index.run("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", (number, key, self._holder, owner, expires_s))
        start, stop, num_rows, digest = found
        return EmbeddingRef(
            key=key,
            arena=self.arena,
            offset_bytes=self._segment.offset_bytes(Extent(start, stop)),
            num_rows=num_rows,
            width=self._rows.width,
            dtype=self._rows.dtype,
            checksum=int.from_bytes(digest),
            lease_id=f"{self._holder}:{number}",
        )

    def release(self, lease_id: str) -> bool:
        """End a lease, whoever gave it; False for an id that is not current."""
        holder, _, number = lease_id.rpartition(":")
        if not number.isdecimal() or len(number) > _MAX_DIGITS:
            return False
        ended = self._or_later(lambda: self._end("number = ? AND holder = ?", (int(number), holder)))
        return self._room_appeared(ended) > 0

    def release_owner(self, owner: str) -> int:
        """End all leases that this store gave to an owner; how many there were."""
        return self._room_appeared(self._or_later(lambda: self._end("holder = ? AND owner = ?", (self._holder, owner))))

    def keep_only(self, owner: str, lease_ids: Collection[str]) -> int:
        """End the leases that an owner was given by any store, but these; how many. Its name is its own everywhere."""

        def act() -> int:
            given = self._index.rows("SELECT number, holder FROM leases WHERE owner = ?", (owner,))
            ended = [number for number, holder in sorted(given) if f"{holder}:{number}" not in lease_ids]
            return sum(self._end("number = ?", (number,)) for number in ended)

        return self._room_appeared(self._or_later(act))

    def expire(self, now_s: float) -> int:
        """End leases past their time, whoever gave them; how many there were. Not put off: it is due again soon."""
        if not self._index.rows("SELECT 1 FROM leases WHERE expires_s <= ? LIMIT 1", (now_s,)):
            return 0
        with self.together():
            ended = self._end("expires_s <= ?", (now_s,))
        return self._room_appeared(ended)

    def tidy(self) -> None:
        """What is due now and then: give back what dead processes had reserved, do what was put off, count."""
        with self.together():
            reclaimed = self._reclaim()
            hits, misses = self._uncounted
            self._index.run(
                "UPDATE holders SET hits = hits + ?, misses = misses + ? WHERE id = ?", (hits, misses, self._holder)
            )
        self._uncounted = [0, 0]
        self._room_appeared(reclaimed)

    def count(self, *, hits: int = 0, misses: int = 0) -> None:
        """Requests that found their embedding here, and those that did not; all processes' are added up."""
        self._uncounted[0] += hits
        self._uncounted[1] += misses

    @property
    def locked_s(self) -> float:
        """For how long another process has kept the arena locked; 0 when it did not at the last attempt to write."""
        return self._index.locked_s

    def changed_elsewhere(self) -> bool:
        """Whether another store of this arena has done anything since the last call."""
        return self._index.changed_elsewhere()

    def content(self, key: MediaKey) -> bytes:
        """A copy of the bytes of a published embedding. Raises KeyError when it is not, or no longer, there."""
        entry = self.lookup(key)
        if entry is None:
            raise KeyError(key)
        copied = bytes(self._segment.view(entry.extent, entry.layout.num_rows * self._rows.row_bytes))
        # Without a lease another process may have begun to write there meanwhile.
        if checksum(copied) != entry.checksum:
            raise KeyError(key)
        return copied

    def leased_content(self, ref: EmbeddingRef) -> bytes:
        """A copy of the bytes of a reference whose lease has not ended; asks nobody."""
        extent = Extent(ref.offset_bytes // self._segment.page_bytes, 0)
        return bytes(self._segment.view(extent, ref.num_rows * self._rows.row_bytes))

    @property
    def num_leases(self) -> int:
        (number,) = self._index.row("SELECT count(*) FROM leases")
        return int(number)

    def usage(self) -> StoreUsage:
        return usage_of(self._index)

    def check(self) -> None:
        """Books balance: free + evictable + leased + reserved == capacity, and no page has two owners."""
        audit(self._index)

    def close(self) -> None:
        """Give back what this store had reserved. What it published and the leases it gave stay."""
        self._index.insist(_CLOSING_S)
        try:
            with self.together():
                self._retire(self._holder)
        except (EncoderBusy, sqlite3.OperationalError) as error:
            # The next process that needs the room finds this one dead.
            logger.warning("the arena %s was left without a word: %s", self.arena, error)
        self._index.close()
        self._put_off.clear()

    # Inside a transaction

    def _make_room(self, num_pages: int) -> Extent | None:
        """A free run, if need be by evicting the least recently used; None, and nothing evicted, if that is no use."""
        extent = self._index.take_pages(num_pages)
        if extent is not None or self._longest_obtainable() < num_pages:
            return extent
        while True:
            # None was long enough before, so only a run that grows now can be.
            victim = self._index.find(
                "DELETE FROM entries WHERE key = "
                "(SELECT key FROM entries WHERE num_leases = 0 ORDER BY last_use_ns LIMIT 1) RETURNING start, stop"
            )
            assert victim is not None, "evicting everything gives the longest obtainable run"
            if self._index.give_pages(Extent(*victim)).num_pages >= num_pages:
                return self._index.take_pages(num_pages)

    def _longest_obtainable(self) -> int:
        """Pages of the longest run between those that are leased or reserved."""
        kept = self._index.rows(
            "SELECT start, stop FROM entries WHERE num_leases > 0 UNION ALL SELECT start, stop FROM reservations"
        )
        end = self._segment.num_pages
        borders: list[tuple[int, int]] = [(0, 0), *((start, stop) for start, stop in sorted(kept)), (end, end)]
        return max(start - stop for (_, stop), (start, _) in pairwise(borders))

    def _reclaim(self) -> int:
        """Give back what dead holders had reserved; how many such holders there were."""
        others = self._index.rows("SELECT id, pid, started_ticks FROM holders WHERE id <> ?", (self._holder,))
        dead = [holder for holder, pid, started in others if not self._lives(Process(pid, started))]
        for holder in dead:
            logger.info("encoder process %s has died; its room in the arena is given back", holder)
            self._retire(holder)
        return len(dead)

    def _retire(self, holder: str) -> None:
        index = self._index
        for start, stop in index.rows("DELETE FROM reservations WHERE holder = ? RETURNING start, stop", (holder,)):
            index.give_pages(Extent(start, stop))
        for counted in index.rows("DELETE FROM holders WHERE id = ? RETURNING hits, misses", (holder,)):
            index.run("UPDATE arena SET hits = hits + ?, misses = misses + ?", counted)

    def _abandon(self, reservation: Reservation) -> int:
        given = self._index.run(
            "DELETE FROM reservations WHERE id = ? AND holder = ?", (reservation.number, self._holder)
        )
        if given:
            self._index.give_pages(reservation.extent)
        return given

    def _end(self, condition: str, arguments: tuple[Any, ...]) -> int:
        """End the leases that meet a condition; how many did. Ended last means used last."""
        index = self._index
        ended = sorted(index.rows(f"DELETE FROM leases WHERE {condition} RETURNING number, key", arguments))
        for _, key in ended:
            index.run(
                "UPDATE entries SET num_leases = num_leases - 1, last_use_ns = ? WHERE key = ?", (index.tick_ns(), key)
            )
        return len(ended)

    def _or_later(self, act: Callable[[], int]) -> int:
        """Do it now or, with the arena locked, before the next transaction; 0 then."""
        try:
            with self.together():
                return act()
        except EncoderBusy:
            self._put_off.append(act)
            return 0

    def _room_appeared(self, num_ended: int) -> int:
        if num_ended and self.on_room is not None:
            self.on_room()
        return num_ended
