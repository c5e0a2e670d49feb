"""From device to host: what is copied, and when.

    a request ends, a prompt is computed    save_path(): all full pages of the path, and the window at its end
    a lookup hits often, a branch is seen   save_path() up to there
    pages are evicted                       leaving_...(), save(): what the host lacks, before they go

Only what the host lacks is copied. Its pages are reserved at once, the copy goes in pieces, so that a load never waits
for a long one; meanwhile the device's pages are pinned, and no eviction takes what the host was promised. Full pages
go from the beginning of the path; without room for all, the rest of it stays out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd.cache.pins import PathPin
from epd.cache.prefix import PrefixCache
from epd.cache.radix import Node
from epd.cache.tiers.hit import LiveWindows
from epd.cache.tiers.host import HostPool, HostTier
from epd.cache.tiers.loads import window_runs
from epd.kv.copies import CopyFailed, CopyTicket, PageCopies, PageMover

__all__ = ["Backups", "HitCounts", "OvertakenWindows"]

_PIECE_PAGES = 128
_MAX_FLYING = 2
"""Pieces under way: one that is copied, one that waits for it."""

OnSaved = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Told of the full and the window keys that were copied and are ready in the host now, in path order."""
_Leaving = tuple[bytes, list[tuple[bytes, int]]]
"""First key of a path; keys and device pages of a run on it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Pages that are copied in one go; keys in path order."""

    full_keys: Sequence[bytes]
    window_keys: Sequence[bytes]
    copies: PageCopies


@dataclass(slots=True, eq=False)
class _Job:
    """One path that is saved. `keys` are those of its full pages, `window_keys` of the window at its end."""

    keys: Sequence[bytes]
    window_keys: Sequence[bytes]
    pieces: deque[_Piece]
    pins: Sequence[PathPin]
    on_saved: OnSaved | None
    saved_full: list[bytes] = field(default_factory=list)
    saved_window: list[bytes] = field(default_factory=list)
    num_flying: int = 0


class Backups:
    """The copies queued and under way; the device ledger's witness. Owned by the engine thread."""

    def __init__(
        self,
        device: PrefixCache,
        host: HostTier,
        mover: PageMover,
        *,
        settle_loads: Callable[[], bool],
    ) -> None:
        """`settle_loads` waits for a load that keeps device pages, and says whether there was one."""
        self._device = device
        self._host = host
        self._mover = mover
        self._settle_loads = settle_loads
        self._queue: deque[_Job] = deque()
        self._flying: deque[tuple[_Job, _Piece, CopyTicket]] = deque()
        self._leaving_full: list[_Leaving] = []
        self._leaving_window: list[_Leaving] = []
        self.num_saves = 0
        self.num_full_pages = 0
        self.num_window_pages = 0
        self.num_failed = 0
        self.num_unsaved_pages = 0
        self.num_rescued_pages = 0

    @property
    def num_pending(self) -> int:
        return len(self._queue) + len(self._flying)

    def save_path(self, keys: Sequence[bytes], num_pages: int, window_start: int, *, on_saved: OnSaved | None) -> bool:
        """Copy to the host what it lacks of the first `num_pages` pages of `keys`, and of the windows of
        [window_start, num_pages), as far as the device has them. Whether there was anything to copy; then `on_saved`
        is told when all is over."""
        if num_pages == 0:
            return False
        host, window_start = self._host, max(0, window_start)
        walk = self._device.ledger.tree.walk(keys, stop=num_pages, window_pages=0)
        stop = walk.num_pages
        host.full.touch(keys[:num_pages])
        host.window.touch(keys[window_start:num_pages])
        pins: list[PathPin] = []
        pieces: deque[_Piece] = deque()
        first = host.full.num_known(keys, 0, stop)
        missing, pages = self._reserve(host.full, keys, range(first, stop), used=keys[:stop])
        if missing:
            pins.append(self._device.pin(keys, missing[-1] + 1))
            pairs = tuple(zip(self._full_pages(keys, missing), pages, strict=True))
            for start in range(0, len(pairs), _PIECE_PAGES):
                part = slice(start, start + _PIECE_PAGES)
                full_keys = [keys[index] for index in missing[part]]
                pieces.append(_Piece(full_keys, (), PageCopies(full=pairs[part])))
        # A window at the end of full pages that the host will not have is of no use.
        if host.full.num_known(keys, first, stop) == stop:
            live = LiveWindows(self._device, walk)
            wanted = [index for index in range(window_start, stop) if index in live]
            missing, pages = self._reserve(host.window, keys, wanted, used=keys[window_start:num_pages])
            window_pins = [self._device.pin(keys, end, window_start=start) for start, end in window_runs(missing)]
            if missing:
                pins += window_pins
                pairs = tuple(zip([page for pin in window_pins for page in pin.window_pages], pages, strict=True))
                pieces.append(_Piece((), [keys[index] for index in missing], PageCopies(window=pairs)))
        if not pieces:
            return False
        self._queue.append(_Job(keys[:stop], keys[window_start:stop], pieces, pins, on_saved))
        self.num_saves += 1
        self.poll()
        return True

    def poll(self) -> bool:
        """Book the pieces that are over, and start those that wait; whether any was over."""
        was_over = False
        while True:
            while self._flying and self._flying[0][2].is_done():
                was_over = True
                self._book(*self._flying.popleft())
            if not self._queue or len(self._flying) >= _MAX_FLYING:
                return was_over
            job = self._queue[0]
            if job.pieces:
                piece = job.pieces.popleft()
                job.num_flying += 1
                self._flying.append((job, piece, self._mover.save(piece.copies)))
            if not job.pieces:
                self._queue.popleft()

    def wait(self) -> None:
        """Return when nothing is queued or under way."""
        while self._wait_for_one():
            pass

    # -- the ledger's witness -------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Wait for the copy that is next to give pages back; False when there is none."""
        return self._wait_for_one() or self._settle_loads()

    def learned(self, keys: Sequence[bytes], num_pages: int) -> None:
        """A boundary at which others will resume: they may do so when the device has lost it."""
        self.save_path(keys, num_pages, num_pages - self._device.window_pages, on_saved=None)

    def leaving_end(self, node: Node, num_pages: int) -> None:
        """As EvictionWitness."""
        if not node.is_hidden:
            kept = node.num_pages - num_pages
            self._leave(self._leaving_full, self._host.full, node, node.keys[kept:], node.full_pages[kept:])
            window_pages = node.window_pages[max(0, len(node.window_pages) - num_pages) :]
            window_keys = node.keys[node.num_pages - len(window_pages) :]
            self._leave(self._leaving_window, self._host.window, node, window_keys, window_pages)

    def leaving_windows(self, node: Node, num_pages: int) -> None:
        """As EvictionWitness."""
        if not node.is_hidden:
            first = node.window_start - node.start
            keys, pages = node.keys[first : first + num_pages], node.window_pages[:num_pages]
            self._leave(self._leaving_window, self._host.window, node, keys, pages)

    def save(self) -> None:
        """Copy what is leaving, and return when it is in the host: full pages in place of what was used less lately,
        windows, most of which are mere offers, where there is room."""
        leaving_full, self._leaving_full = self._leaving_full, []
        leaving_window, self._leaving_window = self._leaving_window, []
        if not leaving_full and not leaving_window:
            return
        full = self._take_room(self._host.full, leaving_full, self._host.full.num_reservable)
        window = self._take_room(self._host.window, leaving_window, self._host.window.num_free)
        copies = PageCopies(full=tuple(full.values()), window=tuple(window.values()))
        if copies.num_pages == 0:
            return
        ticket = self._mover.save(copies)
        try:
            ticket.wait()
        except CopyFailed:
            self.num_failed += 1
            self._host.full.discard(full)
            self._host.window.discard(window)
        else:
            self.num_rescued_pages += copies.num_pages
            self._host.full.publish(list(full))
            self._host.window.publish(list(window))

    def _leave(
        self, leaving: list[_Leaving], pool: HostPool, node: Node, keys: Sequence[bytes], pages: Sequence[int]
    ) -> None:
        unknown = [(key, page) for key, page in zip(keys, pages, strict=True) if not pool.knows(key)]
        if unknown:
            *_, top = self._device.ledger.tree.upwards(node)
            leaving.append((top.keys[0], unknown))

    def _take_room(self, pool: HostPool, leaving: list[_Leaving], room: int) -> dict[bytes, tuple[int, int]]:
        """Reserve for the last of what leaves, which is nearest to the root: (device page, host page) by key."""
        taken: dict[bytes, tuple[int, int]] = {}
        for root, pages in reversed(leaving):
            part = pages[: max(0, room - len(taken))]
            keys = [key for key, _ in part]
            granted = pool.reserve(keys, root=root)
            assert granted is not None
            taken.update(zip(keys, zip([page for _, page in part], granted, strict=True), strict=True))
        return taken

    # -- books ----------------------------------------------------------------------------------------------------

    def _wait_for_one(self) -> bool:
        if self.poll():
            return True
        if not self._flying:
            return False
        with contextlib.suppress(CopyFailed):
            self._flying[0][2].wait()
        self.poll()
        return True

    def _book(self, job: _Job, piece: _Piece, ticket: CopyTicket) -> None:
        job.num_flying -= 1
        try:
            ticket.wait()
        except CopyFailed:
            self.num_failed += 1
            # What follows hangs in the air without it.
            for lost in (piece, *job.pieces):
                self._host.full.discard(lost.full_keys)
                self._host.window.discard(lost.window_keys)
            job.pieces.clear()
        else:
            self._host.full.publish(piece.full_keys)
            self._host.window.publish(piece.window_keys)
            self.num_full_pages += len(piece.full_keys)
            self.num_window_pages += len(piece.window_keys)
            job.saved_full += piece.full_keys
            job.saved_window += piece.window_keys
        if job.pieces or job.num_flying:
            return
        for pin in job.pins:
            pin.release()
        self._host.full.touch(job.keys)
        self._host.window.touch(job.window_keys)
        full, window = self._host.full, self._host.window
        saved_full = [key for key in job.saved_full if full.get(key) is not None]
        saved_window = [key for key in job.saved_window if window.get(key) is not None]
        if job.on_saved is not None:
            job.on_saved(saved_full, saved_window)

    def _reserve(
        self, pool: HostPool, keys: Sequence[bytes], wanted: Sequence[int], *, used: Sequence[bytes]
    ) -> tuple[list[int], list[int]]:
        """Host pages for those of the wanted pages of a path that have none: their indices, and the pages.

        Takes the first ones when there is no room for all. `used`: keys of the path that were just touched, whose
        pages must not make room.
        """
        missing = [index for index in wanted if not pool.knows(keys[index])]
        room = pool.num_free
        if room < len(missing):
            room = max(room, pool.num_reservable - pool.num_evictable_of(used))
        self.num_unsaved_pages += max(0, len(missing) - room)
        missing = missing[:room]
        granted = pool.reserve([keys[index] for index in missing], root=keys[0])
        assert granted is not None
        return missing, granted

    def _full_pages(self, keys: Sequence[bytes], indices: Sequence[int]) -> list[int]:
        """The device's full pages of path pages `indices`, ascending, which the tree holds."""
        pages = []
        nodes = self._device.ledger.tree.path_nodes(keys, indices[-1] + 1)
        node = next(nodes)
        for index in indices:
            while node.stop <= index:
                node = next(nodes)
            pages.append(node.full_pages[index - node.start])
        return pages


class HitCounts:
    """How often lookups hit pages that the host lacks. What it has needs no counting: that is most of them."""

    def __init__(self, host: HostTier, threshold: int) -> None:
        self._host = host
        self._threshold = threshold
        self._full: dict[bytes, int] = {}
        self._ends: dict[bytes, int] = {}

    def count(self, keys: Sequence[bytes], num_pages: int, window_start: int) -> int:
        """A lookup hit `num_pages` pages of `keys` and the windows from `window_start` on. Pages that are to be saved
        now, from the beginning of the path; 0: none."""
        full, window = self._host.full, self._host.window
        hot = 0
        for index in range(full.num_known(keys, 0, num_pages), num_pages):
            if not full.knows(keys[index]) and self._note(self._full, keys[index]):
                hot = index + 1
        if hot < num_pages and window.num_known(keys, window_start, num_pages) < num_pages:
            hot = num_pages if self._note(self._ends, keys[num_pages - 1]) else hot
        return hot

    def _note(self, counts: dict[bytes, int], key: bytes) -> bool:
        if len(counts) > 4 * self._host.full.num_pages:
            counts.clear()
        counts[key] = counts.get(key, 0) + 1
        if counts[key] < self._threshold:
            return False
        del counts[key]
        return True


class OvertakenWindows:
    """Windows on the path of a sequence that has gone on: its next lookup ends deeper, so they make room first.

    Each turn of a conversation leaves the windows of its prompt's and of its answer's end, and of them all only the
    last is likely to be looked up; least recently used alone would let those of busy conversations push out the one of
    a conversation that waits. A boundary that was hit twice is one where paths part: its window is none of these.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._hit_once: dict[bytes, None] = {}
        self._hit_often: dict[bytes, None] = {}

    def path_hit(self, keys: Sequence[bytes]) -> None:
        """A lookup ended behind these pages, having read their windows."""
        if not keys:
            return
        if keys[-1] in self._hit_once:
            self._hit_often.update(dict.fromkeys(keys))
        else:
            self._hit_once[keys[-1]] = None
        for noted in (self._hit_once, self._hit_often):
            while len(noted) > 2 * self._pool.num_pages:
                del noted[next(iter(noted))]

    def path_ended(self, keys: Sequence[bytes]) -> None:
        """A sequence has left these pages behind, and the window of its end after them."""
        self._pool.outdate([key for key in self._pool.ready(keys) if key not in self._hit_often])
