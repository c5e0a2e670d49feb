"""The pages of one running sequence: its row in both pools, from the first lookup to the end. Long because this is
one object with one life: what it leases, takes, receives, publishes and gives back is told in order.

    pages = cache.begin(keys, num_tokens)      # lease what the tree already holds
    pages.extend(stop)                         # room for tokens [0, stop): next prefill chunk, decode token, drafts
    ... compute ...
    pages.commit(stop, keys)                   # [0, stop) is computed: publish whole pages, let go of old windows
    pages.finish()  or  pages.abort()          # exactly once is enough; a second call does nothing

While `arrival` is set, a copy from host memory is filling pages of the row (see tiers/): whoever reads their KV waits
for it layer by layer, and commit(), finish(), abort() and condemn() wait for all of it, so no page is shown or given
back that somebody still writes.

Row page i holds tokens [i*P, (i+1)*P). `full_pages[i]` exists for every page; window pages only from `window_start` on:

    full_pages      f0 f1 f2 f3 f4 f5 f6        published pages belong to the tree (this row leases them),
    window_pages             w3 w4 w5 w6        later ones to the sequence; the owner bytes of the pools know which
                    window_start = 3

commit() may replace ids in the row: where the tree already holds a page with the same key, its page is used from then
on and the sequence's duplicate is freed. Read the row again after every commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from epd.cache.ledger import TreeLedger
from epd.cache.radix import Node, common_pages
from epd.cache.retention import RetentionPolicy
from epd.cache.sharing import share_pages
from epd.cache.window import release_frontier, window_floor
from epd.kv.copies import CopyFailed, CopyTicket
from epd.kv.dual import PageGrant
from epd.kv.errors import PageStateError
from epd.kv.numbers import require_at_least
from epd.kv.pages import PageOwner

__all__ = ["SequencePages"]


class SequencePages:
    """Owned by one sequence of the engine; made by PrefixCache.begin(). Not thread-safe: the step owns it."""

    __slots__ = (
        "_arrived_pages",
        "_has_reopened",
        "_junctions",
        "_ledger",
        "_node",
        "_num_prompt_tokens",
        "_num_published",
        "_on_close",
        "_page_size",
        "_publishes",
        "_retention",
        "_window_tokens",
        "arrival",
        "full_pages",
        "is_open",
        "num_cached_tokens",
        "num_committed_tokens",
        "window_pages",
        "window_start",
    )
    full_pages: list[int]
    """Full-pool page of every row page."""
    window_pages: list[int]
    """Window-pool pages of row pages [window_start, len(full_pages)); empty in a model without window layers."""
    window_start: int
    """First row page that has a window page."""
    num_cached_tokens: int
    """Tokens leased from the tree at the start: they need no computing."""
    num_committed_tokens: int
    """Tokens whose KV is in the row."""
    arrival: CopyTicket | None
    """The copy that fills pages of the row, until it is waited for; None when nothing is on its way."""
    is_open: bool

    def __init__(
        self,
        ledger: TreeLedger,
        retention: RetentionPolicy,
        *,
        page_size: int,
        window_tokens: int,
        num_prompt_tokens: int,
        junction: int | None,
        publishes: bool,
        on_close: Callable[[SequencePages], None],
    ) -> None:
        """Made by PrefixCache.begin(), which leases the hit next; `on_close` is told once when the row ends.

        `junction` is a page boundary to keep once it is computed, because full pages of other sequences end there.
        """
        self._ledger = ledger
        self._retention = retention
        self._page_size = page_size
        self._window_tokens = window_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._junctions = set() if junction is None else {junction}
        self._publishes = publishes
        self._on_close = on_close
        self._node = ledger.tree.root
        self._has_reopened = False
        self._arrived_pages = 0
        self._num_published = 0
        self.full_pages = []
        self.window_pages = []
        self.window_start = 0
        self.num_cached_tokens = 0
        self.num_committed_tokens = 0
        self.arrival = None
        self.is_open = True
        ledger.tree.lock(self._node)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_capacity_tokens(self) -> int:
        """Tokens the row has room for."""
        return len(self.full_pages) * self._page_size

    @property
    def num_published_pages(self) -> int:
        """Row pages that belong to the tree; later ones are the sequence's own."""
        return self._num_published

    @property
    def node(self) -> Node:
        """The tree node whose end is this row's last published page; locked while the row is open."""
        return self._node

    def window_page(self, page_index: int) -> int | None:
        """Window page of row page `page_index`, None where the window has moved on."""
        offset = page_index - self.window_start
        return self.window_pages[offset] if 0 <= offset < len(self.window_pages) else None

    def pages_needed(self, num_tokens: int, *, window_start: int | None = None) -> tuple[int, int]:
        """(full, window) pages that extend() with the same arguments would take. Changes nothing.

        Raises as extend() does, NoPages and a missing window aside.
        """
        self._require_open()
        require_at_least(0, num_tokens=num_tokens)
        stop = max(len(self.full_pages), -(-num_tokens // self._page_size))
        if window_start is not None:
            require_at_least(0, window_start=window_start)
            if self._ledger.window_pages and window_start > stop:
                raise ValueError(f"window_start is {window_start}; allowed: 0 to {stop}, the row's pages")
        if self._ledger.window_pages == 0:
            return stop - len(self.full_pages), 0
        return stop - len(self.full_pages), stop - self._next_window(window_start)

    def extend(self, num_tokens: int, *, window_start: int | None = None) -> None:
        """Make room for tokens [0, num_tokens), in both pools or in neither.

        `window_start` (a page index) is given only when window KV will be *written* for pages that are already there:
        a decode worker receiving a prompt takes `cache.window_frontier(num_tokens)`, healing takes where it re-runs
        from. The row's windows then begin at that page. With the row unchanged, raises NoPages, PageStateError after
        the end, and ValueError for a negative `num_tokens` and a `window_start` outside the row.
        """
        num_full, num_window = self.pages_needed(num_tokens, window_start=window_start)
        if window_start is None and not self._has_whole_window():
            raise ValueError("the row has no window at its end: extend() must be told where windows will be written")
        first = self._next_window(window_start)
        grant = self._ledger.allocate(num_full, num_window)
        self.full_pages += grant.full_pages
        if self._ledger.window_pages == 0:
            return
        if first != self.window_start + len(self.window_pages):
            self._let_go(self.window_start + len(self.window_pages))
            self.window_start = first
        self.window_pages += grant.window_pages
        if window_start is not None:
            self._let_go(window_start)
        self._has_reopened |= first < self._num_published

    def commit(self, num_tokens: int, keys: Sequence[bytes]) -> None:
        """Tokens [0, num_tokens) are computed and final, in every layer the row has pages for.

        `keys` covers at least `num_tokens // page_size` pages of this sequence. Whole pages become visible to other
        sequences; row ids may change to the tree's; windows behind the frontier go unless an anchor keeps them.
        Rejected drafts are simply never committed: their pages stay in the row for the next tokens. Raises CopyFailed,
        with the row unchanged, when what was on its way to it did not arrive.
        """
        self._require_open()
        require_at_least(0, num_tokens=num_tokens)
        num_pages = num_tokens // self._page_size
        if not self.num_committed_tokens <= num_tokens <= self.num_capacity_tokens:
            raise ValueError(
                f"commit of {num_tokens} tokens: {self.num_committed_tokens} committed, "
                f"room for {self.num_capacity_tokens}"
            )
        if self._publishes and len(keys) < num_pages:
            raise ValueError(f"commit of {num_tokens} tokens needs {num_pages} page keys, got {len(keys)}")
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None
        previous = self.num_committed_tokens
        self.num_committed_tokens = num_tokens
        learned: list[int] = []
        if self._publishes:
            if self._has_reopened:
                self._adopt_reopened()
            if num_pages > self._num_published:
                self._publish(keys, num_pages)
            learned = self._set_anchors(previous, num_tokens)
        self._let_go(
            release_frontier(
                num_tokens,
                window_tokens=self._window_tokens,
                page_size=self._page_size,
                tail_pages=self._retention.tail_pages,
                interval_tokens=self._retention.release_interval_tokens,
            )
        )
        if self._ledger.witness is not None:
            for boundary in learned:
                self._ledger.witness.learned(keys, boundary)

    def finish(self) -> None:
        """End of the sequence: what is published stays in the tree with a whole window at its end, the rest goes."""
        if self.is_open and self._publishes:
            stop = self._num_published
            self._anchor(stop - self._ledger.window_pages - self._retention.tail_pages, stop)
        self.abort()

    def abort(self) -> None:
        """End early: published pages stay, no new anchor is set, everything else is freed."""
        if not self.is_open:
            return
        self._await_quiet()
        self.is_open = False
        ledger = self._ledger
        self._let_go(self.window_start + len(self.window_pages))
        ledger.pool.full.free(self.full_pages[self._num_published :], PageOwner.SEQUENCE)
        ledger.touch(self._node)
        if self._num_published * self._page_size > self.num_cached_tokens:
            ledger.note_use(self._node)
        ledger.tree.unlock(self._node)
        ledger.tidy(self._node)
        self.full_pages = []
        self._on_close(self)

    def condemn(self) -> None:
        """End early because a page of the row, whichever, holds wrong KV: nobody may find its published pages again.

        Other rows keep what they lease.
        """
        first_keys = [node.keys[0] for node in self._ledger.tree.upwards(self._node) if node.start == 0]
        self.abort()
        for key in first_keys:
            self._ledger.condemn(key)

    def lease(self, keys: Sequence[bytes], num_pages: int, *, with_window: bool) -> None:
        """Pin the first `num_pages` pages of `keys`, which the tree holds; called by PrefixCache.begin() alone."""
        ledger = self._ledger
        node = ledger.tree.root
        for node in ledger.tree.path_nodes(keys, num_pages):
            self.full_pages += node.full_pages
        if node.stop > num_pages:
            lower, node = node, ledger.tree.split(node, num_pages - node.start)
            ledger.refresh(lower)
        del self.full_pages[num_pages:]
        self._move_lock(node)
        self._num_published = num_pages
        self.window_start = num_pages
        if with_window and ledger.window_pages:
            self._lease_window(window_floor(num_pages, ledger.window_pages))
        self.num_cached_tokens = self.num_committed_tokens = num_pages * self._page_size
        ledger.note_resumption(node)
        ledger.touch(node)
        # A lookup that full pages would have taken further does not show that others will end here.
        if with_window and not self._junctions:
            ledger.note_use(node)

    def receive(self, grant: PageGrant, arrival: CopyTicket, *, window_start: int, num_tokens: int | None) -> None:
        """Take pages that a copy fills, behind those just leased; called by TieredCache alone.

        The row is then as if `num_tokens` tokens were leased, with windows from page `window_start` on, except that the
        first commit publishes what came. None: the pages hold tokens that the caller commits (a prompt that another
        worker computed).
        """
        self.full_pages += grant.full_pages
        self.window_pages = grant.window_pages
        self.window_start = window_start if self._ledger.window_pages else self.window_start
        self._has_reopened = bool(grant.window_pages) and window_start < self._num_published
        self.arrival = arrival
        if num_tokens is not None:
            self.num_cached_tokens = self.num_committed_tokens = num_tokens
            self._arrived_pages = num_tokens // self._page_size if grant.window_pages else 0

    def hide(self) -> None:
        """Publish nothing from now on: what came to this row may be wrong."""
        self._publishes = False

    def _lease_window(self, start: int) -> None:
        runs = []
        for node in self._ledger.tree.upwards(self._node):
            if node.stop <= start:
                break
            runs.append(node.window_pages[max(0, start - node.window_start) :])
        self.window_pages = [page for run in reversed(runs) for page in run]
        self.window_start = start
        self._ledger.hold_windows(self.window_pages)
        # A boundary that was hit once is worth keeping.
        self._ledger.anchored.update(self.window_pages)

    def _publish(self, keys: Sequence[bytes], stop: int) -> None:
        """Hand row pages [published, stop) to the tree; where it already has a page, take that one instead."""
        ledger = self._ledger
        node, at = self._node, self._num_published
        while at < stop:
            child = node.children.get(keys[at])
            if child is None:
                if node.children and node is not ledger.tree.root and self._retention.learns_branches:
                    self._junctions.add(at)
                node = self._publish_new(node, keys, at, stop)
                break
            run = common_pages(child.keys, keys, at, stop)
            if run < child.num_pages:
                lower, child = child, ledger.tree.split(child, run)
                ledger.refresh(lower)
            share_pages(ledger, child, self.full_pages, self.window_pages, self.window_start)
            node, at = child, child.stop
        self._num_published = stop
        self._move_lock(node)
        ledger.touch(node)

    def _publish_new(self, node: Node, keys: Sequence[bytes], start: int, stop: int) -> Node:
        """The tree has none of row pages [start, stop): grow `node` at its end, or hang a child below it."""
        ledger = self._ledger
        full_pages = self.full_pages[start:stop]
        first_window = max(start, self.window_start)
        window_pages = self.window_pages[first_window - self.window_start : max(0, stop - self.window_start)]
        ledger.pool.full.hand_over(full_pages, PageOwner.SEQUENCE, PageOwner.TREE)
        ledger.pool.window.hand_over(window_pages, PageOwner.SEQUENCE, PageOwner.TREE)
        ledger.hold_windows(window_pages)
        own_locks = 1 if node is self._node else 0
        # Windows must stay one run at the node's end, and nobody else's lease may end where the node now ends.
        stays_tail = not node.window_pages or (first_window == start and len(window_pages) == len(full_pages))
        if node is not ledger.tree.root and node.is_leaf and node.num_locks == own_locks and stays_tail:
            ledger.tree.append(node, list(keys[start:stop]), full_pages)
            node.window_pages += window_pages
            # Its end has moved: windows above that only the old end needed are worth less now.
            ledger.windows_changed(node)
            return node
        was_leaf = node is not ledger.tree.root and node.is_leaf
        child = ledger.tree.add_child(node, list(keys[start:stop]), full_pages, window_pages)
        if was_leaf:
            ledger.note_continuation(node, child)
        ledger.refresh(node)
        return child

    def _adopt_reopened(self) -> None:
        """Windows were written again for pages already published: the tree takes those it lacks."""
        for node in list(self._ledger.tree.upwards(self._node)):
            if node.stop <= self.window_start:
                break
            share_pages(self._ledger, node, self.full_pages, self.window_pages, self.window_start)
        self._has_reopened = False

    def _set_anchors(self, previous_tokens: int, num_tokens: int) -> list[int]:
        """Keep the windows that are to outlive the sequence; returns the boundaries at which others will resume."""
        window_pages = self._ledger.window_pages
        learned: list[int] = []
        for start, stop in self._retention.kept_runs(
            previous_tokens,
            num_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            page_size=self._page_size,
            window_pages=window_pages,
        ):
            self._anchor(start, stop)
        for boundary in sorted(self._junctions):
            if boundary <= self._num_published:
                self._junctions.discard(boundary)
                if self.window_start <= window_floor(boundary, window_pages):
                    self._anchor(boundary - window_pages, boundary)
                    self._note_junction(boundary)
                    learned.append(boundary)
        if 0 < self._arrived_pages <= self._num_published:
            # A hit like any other, whose windows were not in the tree until now.
            self._anchor(window_floor(self._arrived_pages, window_pages), self._arrived_pages)
            self._note_junction(self._arrived_pages)
            self._arrived_pages = 0
        return learned

    def _note_junction(self, boundary: int) -> None:
        for node in self._ledger.tree.upwards(self._node):
            if node.stop <= boundary:
                if node.stop == boundary and node is not self._node:
                    self._ledger.note_use(node)
                return

    def _anchor(self, start: int, stop: int) -> None:
        """Keep the windows of row pages [start, stop), as far as the row still has them and the tree holds them.

        Windows that were reopened and never committed are the sequence's own, though their full pages are published.
        """
        first, end = max(0, start - self.window_start), max(0, min(stop, self._num_published) - self.window_start)
        owner = self._ledger.pool.window.owner
        self._ledger.anchored.update(page for page in self.window_pages[first:end] if owner(page) is PageOwner.TREE)

    def _let_go(self, frontier: int) -> None:
        """Give up the row's windows below page `frontier`."""
        count = min(frontier - self.window_start, len(self.window_pages))
        if count <= 0:
            return
        pages, start = self.window_pages[:count], self.window_start
        del self.window_pages[:count]
        self.window_start += count
        owners = self._ledger.pool.window
        shared = [page for page in pages if owners.owner(page) is PageOwner.TREE]
        owners.free([page for page in pages if owners.owner(page) is PageOwner.SEQUENCE], PageOwner.SEQUENCE)
        # The tree's part comes first: pages are handed over from the front.
        self._ledger.release_windows(self._node, start, shared)

    def _next_window(self, window_start: int | None) -> int:
        """First page that extend() would take a window page for."""
        end = self.window_start + len(self.window_pages)
        if window_start is None or self.window_start <= window_start <= end:
            return end
        return window_start

    def _has_whole_window(self) -> bool:
        boundary = self.num_committed_tokens // self._page_size
        return self.window_start <= window_floor(boundary, self._ledger.window_pages)

    def _move_lock(self, node: Node) -> None:
        previous, self._node = self._node, node
        if previous is node:
            return
        self._ledger.tree.lock(node)
        self._ledger.tree.unlock(previous)
        self._ledger.refresh(node)
        self._ledger.tidy(previous)

    def _await_quiet(self) -> None:
        """Nobody writes into the row's pages any more, whatever became of the copy."""
        if self.arrival is not None:
            with contextlib.suppress(CopyFailed):
                self.arrival.wait()
            self.arrival = None

    def _require_open(self) -> None:
        if not self.is_open:
            raise PageStateError("the sequence's pages were already given back")
