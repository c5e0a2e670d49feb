"""A real TieredCache driven by a schedule, with a shadow beside it that is looked at after every step.

Long because every kind of step is here, next to what has to hold of it.

The shadow memories have a tag per page of either tier. A stub forward writes the tag of a key where a real one would
write its KV; copies move tags, when the schedule lets them end. Pages a sequence was just given are wiped, so whoever
reads a page that was given away reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd.cache.keys import page_keys
from epd.cache.prefix import PrefixCache, PrefixHit
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.tiered import StagedPages, StagedPagesLost, TieredCache
from epd.kv.copies import CopyFailed
from epd.kv.dual import DualPool
from epd.kv.errors import NoPages
from epd.kv.pages import PageOwner
from tests.fakes.tag_mover import TagMover, TagTicket
from tests.oracles.tier_oracle import Held, Memory, Tag, brute_force_joint_hit, held_by_device, held_by_host

__all__ = ["OPS", "Setting", "TierWorld"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of everything; `is_instant`: copies end at once."""

    page_size: int = 2
    window_tokens: int = 4
    num_full_pages: int = 24
    num_window_pages: int = 18
    num_host_full_pages: int = 40
    num_host_window_pages: int = 30
    hit_threshold: int = 2
    tail_pages: int = 1
    release_interval_tokens: int = 1
    is_instant: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """One sequence with pages. `num_computed` tokens have KV, or will when its arrival is over."""

    tokens: list[int]
    keys: list[bytes]
    pages: SequencePages
    num_prompt: int
    heal_stop: int = 0
    reads_wrong: bool = False
    """It reads pages that were condemned, so what it writes is wrong."""


@dataclass(slots=True)
class _Staged:
    tokens: list[int]
    keys: list[bytes]
    handle: StagedPages


@dataclass(slots=True)
class Counts:
    """What a schedule came to see."""

    loads: int = 0
    windows_from_both: int = 0
    refused: int = 0
    failed_loads: int = 0
    staged: int = 0
    condemned: int = 0
    joint_beats_device: int = 0
    by_op: dict[str, int] = field(default_factory=dict)


class TierWorld:
    """One cache, its shadow and the sequences that run."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pool = DualPool(num_full_pages=setting.num_full_pages, num_window_pages=setting.num_window_pages)
        self.device = PrefixCache(
            self.pool,
            page_size=setting.page_size,
            window_tokens=setting.window_tokens,
            retention=RetentionPolicy(
                retention_stride_tokens=3 * setting.page_size,
                learning_threshold_tokens=setting.page_size,
                tail_pages=setting.tail_pages,
                release_interval_tokens=setting.release_interval_tokens,
            ),
        )
        self.host = HostTier(num_full_pages=setting.num_host_full_pages, num_window_pages=setting.num_host_window_pages)
        self.device_memory = Memory(setting.num_full_pages, setting.num_window_pages)
        self.host_memory = Memory(setting.num_host_full_pages, setting.num_host_window_pages)
        self.mover = TagMover(self.device_memory, self.host_memory, is_instant=setting.is_instant)
        self.cache = TieredCache(self.device, host=self.host, mover=self.mover, hit_threshold=setting.hit_threshold)
        self.runs: list[Run] = []
        self.staged: list[_Staged] = []
        self.fetching: list[list[bytes]] = []
        self.counts = Counts()
        self._roots: dict[bytes, bytes] = {}
        self._promised: tuple[set[bytes], set[bytes]] = (set(), set())
        self._num_lossy = 0
        self._texts = [self._text(number) for number in range(6)]

    # -- what there is to look up ---------------------------------------------------------------------------------

    def _text(self, number: int) -> list[int]:
        """Texts 0 to 3 begin alike for some pages, 4 and 5 have another beginning; all are long."""
        page_size = self.setting.page_size
        shared = (5, 5, 3, 3, 0, 4)[number] * page_size
        beginning = [1000 + 500 * (number >= 4) + index for index in range(shared)]
        return beginning + [10_000 * (number + 1) + index for index in range(20 * page_size)]

    def tokens(self, text: int, length: int) -> list[int]:
        whole = self._texts[text % len(self._texts)]
        return whole[: 1 + length % (len(whole) - 8)]

    def keys_of(self, tokens: Sequence[int]) -> list[bytes]:
        keys = page_keys(tokens, [], page_size=self.setting.page_size, seed=b"tiers")
        for key in keys:
            self._roots[key] = keys[0]
        return keys

    def tiers(self) -> tuple[Held, Held]:
        return held_by_device(self.device), held_by_host(self.host, list(self._roots))

    # -- steps ----------------------------------------------------------------------------------------------------

    def do(self, op: str, first: int, second: int) -> None:
        """One step, and everything that must hold after it."""
        self.counts.by_op[op] = self.counts.by_op.get(op, 0) + 1
        before = len(self.mover.tickets)
        getattr(self, f"_{op}")(first, second)
        self._wipe_targets(self.mover.tickets[before:])
        self.verify()

    def _submit(self, text: int, length: int) -> None:
        self._start(self.tokens(text, length), full_only=False, cap=None)

    def _submit_capped(self, text: int, length: int) -> None:
        """Less was promised than is there now."""
        self._start(self.tokens(text, length), full_only=False, cap=(length // 3) * self.setting.page_size)

    def _heal(self, text: int, length: int) -> None:
        self._start(self.tokens(text, length), full_only=True, cap=None)

    def _start(self, tokens: list[int], *, full_only: bool, cap: int | None) -> None:
        cache, keys, num_tokens = self.cache, self.keys_of(tokens), len(tokens)
        hit, tiers = cache.match(keys, num_tokens), self.tiers()
        self._verify_hit(hit, tiers, keys, num_tokens)
        wanted = hit.num_full_only_tokens if full_only else hit.num_tokens
        if cap is not None and cap < wanted:
            wanted, _ = self._brute_force(tiers, keys, min(num_tokens, cap + 1))
        can_fit = cache.fits(0, 0, keys=keys, num_tokens=num_tokens, full_only=full_only)
        books = self._books()
        num_tickets = len(self.mover.tickets)
        try:
            pages = cache.resume(keys, num_tokens, cap, full_only=full_only)
        except NoPages:
            self.counts.refused += 1
            assert cap is not None or not can_fit, "pages that fit were refused"
            assert not self.mover.pending or books[0] == self._books()[0]
            return
        assert pages.num_cached_tokens <= wanted
        if not self._was_evicted(tiers):
            assert pages.num_cached_tokens == wanted, "less than what was found, and nothing had gone"
        loads = [ticket for ticket in self.mover.tickets[num_tickets:] if ticket.is_load]
        self._verify_load(pages, keys, tiers, loads, full_only=full_only)
        run = Run(tokens, keys, pages, num_tokens)
        self.runs.append(run)
        self._wipe_targets(loads)
        if full_only and pages.num_cached_tokens:
            self._open_for_healing(run)
        if run in self.runs:
            cache.admitted(keys, hit)

    def _open_for_healing(self, run: Run) -> None:
        stop = run.pages.num_cached_tokens
        try:
            run.pages.extend(stop, window_start=self.cache.window_frontier(stop))
        except NoPages:
            run.pages.abort()
            self.runs.remove(run)
            return
        run.heal_stop = stop

    def _step(self, which: int, num_tokens: int) -> None:
        """Compute the next chunk of a sequence, or a token beyond its prompt."""
        run = self._run(which)
        if run is None:
            return
        pages, page_size = run.pages, self.setting.page_size
        if run.heal_stop:
            start = self.cache.window_frontier(run.heal_stop) * page_size
            self._compute(run, start, run.heal_stop, windows_only=True)
            self._commit(run, run.heal_stop)
            run.heal_stop = 0
            return
        start = pages.num_committed_tokens
        stop = min(len(run.tokens), start + 1 + num_tokens % (4 * page_size))
        if stop == start:
            run.tokens.append(70_000 + len(run.tokens) + 100 * len(run.keys))
            run.keys = self.keys_of(run.tokens)
            stop = start + 1
        try:
            pages.extend(stop)
        except NoPages:
            self.counts.refused += 1
            return
        self._compute(run, start, stop)
        self._commit(run, stop)

    def _compute(self, run: Run, start: int, stop: int, *, windows_only: bool = False) -> None:
        """The stub forward. A page belongs to its last token's key; one that is not whole is not published."""
        pages, page_size, memory = run.pages, self.setting.page_size, self.device_memory
        for index in range(start // page_size, -(-stop // page_size)):
            tag = Tag(run.keys[index], run.reads_wrong) if index < len(run.keys) else None
            if not windows_only:
                memory.full[pages.full_pages[index]] = tag
            window_page = pages.window_page(index)
            if window_page is not None:
                memory.window[window_page] = tag

    def _commit(self, run: Run, stop: int) -> None:
        had_arrival = run.pages.arrival is not None
        try:
            run.pages.commit(stop, run.keys)
        except CopyFailed:
            assert had_arrival
            self.counts.failed_loads += 1
            run.pages.abort()
            self.runs.remove(run)
            return
        assert run.pages.arrival is None
        self._verify_row(run)
        if stop == run.num_prompt:
            self._keep(self.cache.prefilled, run.keys, run.num_prompt // self.setting.page_size)

    def _finish(self, which: int, _: int) -> None:
        run = self._run(which)
        if run is not None:
            num_pages = run.pages.num_published_pages
            run.pages.finish()
            self.runs.remove(run)
            self._keep(self.cache.ended, run.keys, num_pages)

    def _retract(self, which: int, _: int) -> None:
        run = self._run(which)
        if run is not None:
            run.pages.finish()
            self.runs.remove(run)

    def _abort(self, which: int, _: int) -> None:
        run = self._run(which)
        if run is not None:
            run.pages.abort()
            self.runs.remove(run)

    def _keep(self, trigger: Callable[[Sequence[bytes], int], None], keys: list[bytes], num_pages: int) -> None:
        """The host has, or is being given, what the device had, unless it said that it has no room."""
        unsaved = self.cache.stats().host.num_unsaved_pages  # type: ignore[union-attr]
        device = held_by_device(self.device)
        # What somebody else is bringing, or has condemned, counts as had, and may never be.
        coming = [{key for key in keys if pool.is_filling(key)} for pool in (self.host.full, self.host.window)]
        trigger(keys, num_pages)
        if self.cache.stats().host.num_unsaved_pages == unsaved:  # type: ignore[union-attr]
            path = keys[:num_pages]
            kept_pages = self.device.window_pages + self.setting.tail_pages if self.device.window_pages else 0
            window = path[max(0, num_pages - kept_pages) :]
            for key in path:
                if key in device.full:
                    assert self.host.full.knows(key), "a full page was to be saved and was not"
                    self._promised[0].update({key} - coming[0])
            if all(key in device.full or self.host.full.knows(key) for key in path):
                for key in window:
                    if key in device.window:
                        assert self.host.window.knows(key), "a window page was to be saved and was not"
                        self._promised[1].update({key} - coming[1])

    def _evict_full(self, num_pages: int, _: int) -> None:
        self.device.ledger.evict_full(1 + num_pages)

    def _evict_window(self, num_pages: int, _: int) -> None:
        self.device.ledger.evict_window(1 + num_pages)

    def _end_copy(self, which: int, polls: int) -> None:
        """Copies end in any order."""
        if self.mover.pending:
            self.mover.pending[which % len(self.mover.pending)].end()
        if polls % 3:
            self.cache.poll()

    def _fail_copy(self, which: int, _: int) -> None:
        if self.mover.pending:
            self.mover.pending[which % len(self.mover.pending)].end(fails=True)
        self.cache.poll()

    def _poll(self, _: int, __: int) -> None:
        self.cache.poll()

    def _condemn(self, which: int, rarely: int) -> None:
        run = self._run(which)
        if run is None or rarely % 4:
            return
        self.counts.condemned += 1
        root = run.keys[0] if run.keys else None
        run.pages.condemn()
        self.runs.remove(run)
        if root is None:
            return
        self._mark_wrong(root)
        self.cache.condemn(run.keys)
        for promised in self._promised:
            promised.difference_update([key for key in promised if self._roots[key] == root])
        device, host = self.tiers()
        for keys in (device.full, device.window, host.full, host.window):
            assert not any(self._roots[key] == root for key in keys), "a condemned page can be found"
        assert self.cache.match(run.keys, len(run.tokens)) == PrefixHit(0, 0)

    def _mark_wrong(self, root: bytes) -> None:
        """Everything on that path is wrong, and what sequences that read it have written and will write. Those that
        computed all of it themselves are right."""
        own: list[tuple[set[int], set[int]]] = []
        for run in self.runs:
            pages, tree = run.pages, self.pool.window.owner
            full = set(pages.full_pages[pages.num_published_pages :])
            window = {page for page in pages.window_pages if tree(page) is not PageOwner.TREE}
            reads = pages.num_published_pages or pages.num_cached_tokens or pages.arrival is not None
            if run.keys and run.keys[0] == root and reads:
                run.reads_wrong = True
            else:
                own.append((full, window))
        right_full = {page for full, _ in own for page in full}
        right_window = {page for _, window in own for page in window}
        for tags, right in (
            (self.device_memory.full, right_full),
            (self.device_memory.window, right_window),
            (self.host_memory.full, set[int]()),
            (self.host_memory.window, set[int]()),
        ):
            for page, tag in enumerate(tags):
                if tag is not None and self._roots[tag.key] == root and page not in right:
                    tags[page] = Tag(tag.key, is_wrong=True)

    def _clear(self, which: int, _: int) -> None:
        if which % 4 == 0:
            self.cache.clear()
            for keys in self._promised:
                keys.clear()

    def _stage(self, text: int, length: int) -> None:
        """A prompt that another worker computed has arrived."""
        tokens = self.tokens(text, length)
        keys = self.keys_of(tokens)
        before = (self.host.full.stats(), self.host.window.stats())
        handle = self.cache.stage(keys, len(tokens))
        if handle is None:
            self.counts.refused += 1
            after = (self.host.full.stats(), self.host.window.stats())
            # Copies may have been waited for; nothing else has changed.
            assert [each.pinned for each in after] == [each.pinned for each in before]
            return
        self._write_staged(keys, handle)
        self.staged.append(_Staged(tokens, keys, handle))
        self.counts.staged += 1

    def _write_staged(self, keys: list[bytes], handle: StagedPages) -> None:
        page_size, num_pages = self.setting.page_size, -(-handle.num_tokens // self.setting.page_size)
        assert all(0 <= index < num_pages for index, _ in handle.full)
        frontier = self.cache.window_frontier(handle.num_tokens)
        assert all(frontier <= index < num_pages for index, _ in handle.window)
        for pairs, tags in ((handle.full, self.host_memory.full), (handle.window, self.host_memory.window)):
            for index, page in pairs:
                tags[page] = Tag(keys[index]) if index < handle.num_tokens // page_size else None

    def _take_staged(self, which: int, gives_up: int) -> None:
        if not self.staged:
            return
        staged = self.staged[which % len(self.staged)]
        if gives_up % 4 == 0:
            self.cache.unstage(staged.handle)
            self.staged.remove(staged)
            return
        before = len(self.mover.tickets)
        try:
            pages = self.cache.resume_staged(staged.handle)
        except StagedPagesLost:
            self.cache.unstage(staged.handle)
            self.staged.remove(staged)
            return
        except NoPages:
            self.counts.refused += 1
            return
        self.staged.remove(staged)
        run = Run(staged.tokens, staged.keys, pages, len(staged.tokens))
        self.runs.append(run)
        self._wipe_targets([ticket for ticket in self.mover.tickets[before:] if ticket.is_load])
        assert len(pages.full_pages) == -(-len(staged.tokens) // self.setting.page_size)
        self._commit(run, len(staged.tokens))

    def _fetch(self, text: int, length: int) -> None:
        """As a store does: pages of the host are reserved, and come some time later."""
        keys = self.keys_of(self.tokens(text, length))
        wanted = self.host.full.absent(keys)[: 1 + length % 5]
        if wanted and self.host.full.reserve(wanted, root=keys[0]) is not None:
            self.fetching.append(wanted)

    def _fetched(self, which: int, comes: int) -> None:
        if not self.fetching:
            return
        keys = self.fetching.pop(which % len(self.fetching))
        if comes % 2:
            self.host.full.publish(keys)
            for key in keys:
                if (page := self.host.full.get(key)) is not None:
                    self.host_memory.full[page] = Tag(key)
        else:
            self.host.full.discard(keys)

    def _run(self, which: int) -> Run | None:
        return self.runs[which % len(self.runs)] if self.runs else None

    # -- what must hold -------------------------------------------------------------------------------------------

    def verify(self) -> None:
        self.cache.check()
        device, host = self.tiers()
        for held, memory, name in ((device, self.device_memory, "device"), (host, self.host_memory, "host")):
            for keys, tags in ((held.full, memory.full), (held.window, memory.window)):
                for key, page in keys.items():
                    assert tags[page] == Tag(key), f"{name}: page {page} of {key.hex()} contains {tags[page]}"
        self._verify_promises()

    def _verify_promises(self) -> None:
        """What the host was to have it has, or is being given; unless it evicted it in favour of something else, or
        the copy failed."""
        stats = self.cache.stats().host
        assert stats is not None
        lossy = stats.full.num_evicted + stats.window.num_evicted + stats.num_failed_saves
        for pool, keys in zip((self.host.full, self.host.window), self._promised, strict=True):
            lost = [key for key in keys if not pool.knows(key)]
            may_lose = lossy > self._num_lossy
            assert not lost or may_lose, "the host was promised pages, and they are gone"
            keys.difference_update(lost)
        self._num_lossy = lossy

    def _verify_hit(self, hit: PrefixHit, tiers: tuple[Held, Held], keys: list[bytes], num_tokens: int) -> None:
        found = self._brute_force(tiers, keys, num_tokens)
        assert (hit.num_tokens, hit.num_full_only_tokens) == found, f"brute force finds {found}, match() {hit}"
        alone = self._brute_force(tiers[:1], keys, num_tokens)
        of_device = self.device.match(keys, num_tokens)
        assert (of_device.num_tokens, of_device.num_full_only_tokens) == alone
        assert hit.num_host_tokens == max(0, hit.num_tokens - alone[1])
        alone_host = self._brute_force(tiers[1:], keys, num_tokens)
        self.counts.joint_beats_device += found[0] > max(alone[0], alone_host[0])

    def _brute_force(self, tiers: Sequence[Held], keys: list[bytes], num_tokens: int) -> tuple[int, int]:
        return brute_force_joint_hit(
            tiers,
            keys,
            num_tokens,
            page_size=self.setting.page_size,
            window_tokens=self.setting.window_tokens,
        )

    def _verify_load(
        self,
        pages: SequencePages,
        keys: list[bytes],
        tiers: tuple[Held, Held],
        loads: list[TagTicket],
        *,
        full_only: bool,
    ) -> None:
        """Exactly what the device lacked was asked for, from where it was, to pages of the row's own."""
        (device, host), page_size = tiers, self.setting.page_size
        num_pages = pages.num_cached_tokens // page_size
        assert len(pages.full_pages) == num_pages
        floor = num_pages if full_only else max(0, num_pages - self.device.window_pages)
        has_windows = all(key in device.window for key in keys[floor:num_pages])
        if not loads:
            assert pages.arrival is None
            assert all(key in device.full for key in keys[:num_pages])
            assert has_windows
            return
        (load,) = loads
        self.counts.loads += 1
        lacking = [index for index in range(num_pages) if keys[index] not in device.full]
        assert [(source, target) for source, target in load.copies.full] == [
            (host.full[keys[index]], pages.full_pages[index]) for index in lacking
        ]
        # Without room the device may have evicted what it had: then there is more to load, never less.
        expected_window, expected_local = [], []
        for index in range(floor, num_pages):
            target = pages.window_page(index)
            assert target is not None
            if keys[index] in device.window:
                expected_local.append((device.window[keys[index]], target))
            else:
                expected_window.append((host.window[keys[index]], target))
        assert sorted(load.copies.window) == sorted(expected_window)
        assert sorted(load.copies.local_window) == sorted(expected_local)
        self.counts.windows_from_both += bool(expected_local and expected_window)
        assert all(self.pool.full.owner(target) is PageOwner.SEQUENCE for _, target in load.copies.full)
        assert all(self.pool.window.owner(target) is PageOwner.SEQUENCE for _, target in load.copies.window)

    def _verify_row(self, run: Run) -> None:
        """Everything the row will be read for has the right contents."""
        pages, page_size = run.pages, self.setting.page_size
        for index in range(pages.num_committed_tokens // page_size):
            tag = self.device_memory.full[pages.full_pages[index]]
            assert tag is not None
            assert tag.key == run.keys[index]
            window_page = pages.window_page(index)
            if window_page is not None:
                tag = self.device_memory.window[window_page]
                assert tag is not None
                assert tag.key == run.keys[index]

    def _was_evicted(self, before: tuple[Held, Held]) -> bool:
        """Whether anything of what there was can no longer be found."""
        for was, now in zip(before, self.tiers(), strict=True):
            if not was.full.keys() <= now.full.keys() or not was.window.keys() <= now.window.keys():
                return True
        return False

    def _books(self) -> tuple[Held, object]:
        """What a refusal must leave as it was."""
        return held_by_device(self.device), (self.host.full.num_ready, self.host.window.num_ready)

    def _wipe_targets(self, tickets: Sequence[TagTicket]) -> None:
        """Pages that a copy has not filled yet contain nothing."""
        for ticket in tickets:
            if ticket.is_done():
                continue
            memory = self.device_memory if ticket.is_load else self.host_memory
            for _, target in ticket.copies.full:
                memory.full[target] = None
            for _, target in (*ticket.copies.window, *ticket.copies.local_window):
                memory.window[target] = None

    def close(self) -> None:
        """End everything; nothing may be held by anybody afterwards."""
        for run in list(self.runs):
            run.pages.abort()
        for staged in self.staged:
            self.cache.unstage(staged.handle)
        while self.fetching:
            self._fetched(0, 0)
        while self.cache.next_event_pending:
            for ticket in self.mover.pending:
                ticket.end()
            self.cache.poll()
        self.verify()
        stats = self.cache.stats()
        assert stats.host is not None
        assert (stats.full.leased, stats.window.leased, stats.num_sequences) == (0, 0, 0)
        for pool in (stats.host.full, stats.host.window):
            assert (pool.filling, pool.pinned, pool.doomed) == (0, 0, 0)
        assert not self.device.ledger.refs


OPS = (
    *("submit",) * 4,
    "submit_capped",
    "heal",
    *("step",) * 6,
    *("finish",) * 2,
    "retract",
    "abort",
    "evict_full",
    "evict_window",
    *("end_copy",) * 3,
    "fail_copy",
    "poll",
    "condemn",
    "clear",
    "stage",
    "take_staged",
    "fetch",
    "fetched",
)
"""Kinds of steps, those of which there are to be more several times."""
