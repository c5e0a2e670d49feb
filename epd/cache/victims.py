"""Which pages go first when a pool is short: the policies of the prefix cache.

`MarginalLoss`, the default, asks what a lookup would lose. Every node carries a heat: how many lookups lately found it
their deepest usable boundary, or will, since a sequence that ended here is likely to be continued. Then

    loss of a window = sum over the boundaries that need it of heat x tokens down to the next shallower usable boundary
                       (healing bounds the tokens by what healing costs)

A window no usable boundary needs loses nothing and goes first (class 0). A boundary that deeper ones have overtaken has
little heat, since its lookups now end deeper, and a small distance: it is cheap. The end of a branch has the heat of
the branch. When a boundary goes, its heat moves to the next shallower one, where its lookups will end from then on,
so a path gets dearer the fewer boundaries it has left. Heat halves every so many lookups; as everything decays alike,
the order never changes by waiting, and log2(loss) + time / half-life is a key for a heap.

Full pages go by last use, with one thing more to tell: a leaf that a lookup has resumed from is more likely to be
resumed from again than one that only ever was a prompt and its answer, most of which nobody comes back to. Its pages
are kept for as long again as pages live at present: it counts as used that much later.

`TailKeepingLru` knows recency and the shape of a node, `PlainLru` recency alone; both are there to be compared with.
"""

from __future__ import annotations

import math
from typing import Protocol, get_args

from epd.cache.boundaries import end_is_usable, ends_needing, next_usable
from epd.cache.lru import Rank
from epd.cache.radix import Node
from epd.config import WindowEviction
from epd.kv.numbers import require_at_least

__all__ = ["MarginalLoss", "PlainLru", "TailKeepingLru", "VictimPolicy", "make_policy"]

_UNUSED_HEAT = 1 / 32
"""What a boundary is worth that nobody has used: lookups per half-life, against 1 for the end of a sequence."""
_KEY_STEPS = 1 << 16
"""Steps of a key per factor of two."""
_LIFETIME_SAMPLES = 16
"""Evictions that the present lifetime of full pages is a mean over, roughly."""
_CROWDED = 1 << 10
"""Factor for a window that more boundaries need than are looked at."""


class VictimPolicy(Protocol):
    """Orders victims; the smallest rank goes first."""

    looks_around: bool
    """Whether ranks depend on other nodes. If so a queued rank may be too small and is looked up again when it is the
    first; after changes that make ranks smaller the ledger queues the nodes around anew (`windows_changed`)."""

    def full_rank(self, node: Node) -> Rank:
        """For a leaf nobody uses."""
        ...

    def window_rank(self, node: Node) -> Rank:
        """For a node whose first live window page nobody uses."""
        ...

    def num_spare_windows(self, node: Node) -> int:
        """Window pages, at least one, at the front of the node's tail that may go under its present rank."""
        ...

    def touched(self, node: Node, clock: int) -> None:
        """A sequence passed through the node's windows. `clock`: lookups so far."""
        ...

    def used(self, node: Node, clock: int) -> None:
        """A lookup ended, or the next is likely to end, at the node's end."""
        ...

    def resumed(self, node: Node) -> None:
        """A lookup ended at the end of this leaf and its sequence goes on from there."""
        ...

    def overtaken(self, node: Node, child: Node) -> None:
        """`child` continues what was a leaf."""
        ...

    def ran_short(self, rank: Rank, tick: int) -> None:
        """Full pages are about to go, first those of the node of this rank. `tick`: uses so far, as in Node.access."""
        ...

    def ends_lost(self, node: Node, num_windows: int) -> None:
        """So many window pages are about to go from the front of the node's tail."""
        ...

    def leaf_lost(self, node: Node) -> None:
        """The end of a leaf is gone, full pages and all; the node may be out of the tree."""
        ...


class PlainLru:
    """Least recently used node first, all of its windows at once. Made for comparison."""

    looks_around = False

    def full_rank(self, node: Node) -> Rank:
        return (0, node.access)

    def window_rank(self, node: Node) -> Rank:
        return (0, node.window_access)

    def num_spare_windows(self, node: Node) -> int:
        return len(node.window_pages)

    def touched(self, node: Node, clock: int) -> None:
        """Recency is kept by the ledger."""

    def used(self, node: Node, clock: int) -> None:
        """Recency is kept by the ledger."""

    def resumed(self, node: Node) -> None:
        """Recency is kept by the ledger."""

    def overtaken(self, node: Node, child: Node) -> None:
        """Nothing moves."""

    def ran_short(self, rank: Rank, tick: int) -> None:
        """Recency is kept by the ledger."""

    def ends_lost(self, node: Node, num_windows: int) -> None:
        """Nothing moves."""

    def leaf_lost(self, node: Node) -> None:
        """Nothing moves."""


class TailKeepingLru(PlainLru):
    """Least recently used, except that what nobody can use goes first and a branch's own end goes last.

    Full pages: a leaf whose end has lost its window (nothing can resume there) before any other leaf.
    Windows: an unusable remnant, then pages in front of a node's last window and its tail pages, then those: an
    identical prompt is looked up one boundary before its end, so the page before the window is part of the end.
    """

    def __init__(self, window_pages: int, *, tail_pages: int) -> None:
        """`window_pages`: pages a boundary needs live before it; `tail_pages` as in RetentionPolicy."""
        require_at_least(0, window_pages=window_pages, tail_pages=tail_pages)
        self._window_pages = window_pages
        self._kept_pages = window_pages + tail_pages

    def full_rank(self, node: Node) -> Rank:
        return (1 if self._end_is_usable(node) else 0, node.access)

    def window_rank(self, node: Node) -> Rank:
        if node.is_leaf and not self._end_is_usable(node):
            return (0, node.window_access)
        return (1 if len(node.window_pages) > self._kept_pages else 2, node.window_access)

    def num_spare_windows(self, node: Node) -> int:
        spare = len(node.window_pages) - self._kept_pages
        return spare if spare > 0 else len(node.window_pages)

    def _end_is_usable(self, node: Node) -> bool:
        return len(node.window_pages) >= min(self._window_pages, node.num_pages)


class MarginalLoss:
    """The window goes whose loss costs the fewest tokens of later hits; see the module's text.

    Full pages: first leaves nothing can resume at the end of, by windows or by healing; then the least recently used,
    those that were resumed from a lifetime later.
    """

    looks_around = True

    def __init__(
        self,
        window_pages: int,
        *,
        tail_pages: int,
        page_size: int,
        heal_tokens: int = 0,
        half_life_lookups: float = 256.0,
    ) -> None:
        """`window_pages`: pages a boundary needs live before it; `tail_pages` as in RetentionPolicy.

        `heal_tokens` is what healing computes at most, layers x reach, 0 without healing. A boundary used once keeps
        half its weight for `half_life_lookups`; about as many as the window pool holds ends of sequences suits.
        """
        require_at_least(0, window_pages=window_pages, tail_pages=tail_pages, heal_tokens=heal_tokens)
        require_at_least(1, page_size=page_size)
        if not 0 < half_life_lookups < math.inf:
            raise ValueError(f"half_life_lookups is {half_life_lookups}; allowed: above 0, finite")
        self._window_pages = window_pages
        self._kept_pages = window_pages + tail_pages
        self._page_size = page_size
        self._heal_tokens = heal_tokens
        self._half_life = half_life_lookups
        self._lifetime = 0.0

    def full_rank(self, node: Node) -> Rank:
        if not end_is_usable(node, self._window_pages):
            _, above = next_usable(node, self._window_pages)
            if self._heal_tokens == 0 or (node.stop - above) * self._page_size <= self._heal_tokens:
                return (0, node.access)
        return (1, node.access + node.credit)

    def window_rank(self, node: Node) -> Rank:
        spare = len(node.window_pages) - self._kept_pages
        if spare > 0:
            _, above = next_usable(node, self._window_pages)
            boundary = node.window_start + self._window_pages + min(spare, self._window_pages) - 1
            return (1, self._key(_UNUSED_HEAT * self._distance(boundary, above), node.heat_at))
        ends, is_all = self._ends(node)
        if not ends:
            return (0, node.window_access)
        _, above = next_usable(node, self._window_pages)
        latest = max(end.heat_at for end in ends)
        loss = sum(
            (_UNUSED_HEAT + end.heat) * self._distance(end.stop, above) * self._decay(latest - end.heat_at)
            for end in ends
        )
        return (1, self._key(loss if is_all else loss * _CROWDED, latest))

    def num_spare_windows(self, node: Node) -> int:
        spare = len(node.window_pages) - self._kept_pages
        if spare > 0:
            return min(spare, max(1, self._window_pages))
        first = node.window_start
        ends, _ = ends_needing(node, self._window_pages)
        later = [end.stop - self._window_pages for end in ends if end is not node]
        return min((page - first for page in later if page > first), default=len(node.window_pages))

    def touched(self, node: Node, clock: int) -> None:
        node.heat *= self._decay(clock - node.heat_at)
        node.heat_at = clock

    def used(self, node: Node, clock: int) -> None:
        if node.parent is None:
            return
        target = node if end_is_usable(node, self._window_pages) else next_usable(node, self._window_pages)[0]
        if target is not None and target.is_leaf:
            # One sequence, one continuation, however many turns it had.
            target.heat, target.heat_at = 1.0, clock
        elif target is not None:
            self._warm(target, 1.0, clock)

    def resumed(self, node: Node) -> None:
        node.credit = round(self._lifetime)

    def ran_short(self, rank: Rank, tick: int) -> None:
        is_usable, used = rank
        if is_usable:
            self._lifetime += (max(0, tick - used) - self._lifetime) / _LIFETIME_SAMPLES

    def overtaken(self, node: Node, child: Node) -> None:
        node.credit, child.credit = 0, max(node.credit, child.credit)
        heat, at = node.heat, node.heat_at
        node.heat = 0.0
        latest = max(at, child.heat_at)
        child.heat = max(heat * self._decay(latest - at), child.heat * self._decay(latest - child.heat_at))
        child.heat_at = latest

    def ends_lost(self, node: Node, num_windows: int) -> None:
        first = node.window_start + num_windows
        ends, _ = ends_needing(node, self._window_pages)
        lost = [end for end in ends if end.stop - self._window_pages < first]
        if lost:
            above, _ = next_usable(node, self._window_pages)
            for end in lost:
                self._move(end, above)

    def leaf_lost(self, node: Node) -> None:
        if not node.keys or not end_is_usable(node, self._window_pages):
            above, _ = next_usable(node, self._window_pages)
            self._move(node, above)

    def _ends(self, node: Node) -> tuple[list[Node], bool]:
        """Ends that need the first live page of the node, or, for its own end, one of its tail pages."""
        first = node.window_start
        ends, is_all = ends_needing(node, self._window_pages)
        return [end for end in ends if end is node or end.stop - self._window_pages <= first], is_all

    def _distance(self, boundary: int, above: int) -> int:
        """Tokens that lookups lose when they end at page boundary `above` instead of `boundary`."""
        tokens = max(1, boundary - above) * self._page_size
        return min(tokens, self._heal_tokens) if self._heal_tokens else tokens

    def _move(self, node: Node, target: Node | None) -> None:
        if target is not None:
            self._warm(target, node.heat, node.heat_at)
        node.heat = 0.0

    def _warm(self, node: Node, heat: float, at: int) -> None:
        latest = max(node.heat_at, at)
        node.heat = node.heat * self._decay(latest - node.heat_at) + heat * self._decay(latest - at)
        node.heat_at = latest

    def _decay(self, num_lookups: int) -> float:
        return math.exp2(-num_lookups / self._half_life)

    def _key(self, loss: float, at: int) -> int:
        return round(_KEY_STEPS * (math.log2(loss) + at / self._half_life))


def make_policy(
    name: WindowEviction, *, window_pages: int, tail_pages: int, page_size: int, num_window_pages: int, heal_tokens: int
) -> VictimPolicy:
    """The policy of that name for a window pool of `num_window_pages`; `heal_tokens` as in MarginalLoss.

    Raises ValueError for another name, and for a number below 0 (a `page_size` below 1).
    """
    names = get_args(WindowEviction)
    if name not in names:
        raise ValueError(f"name is {name!r}; allowed: {', '.join(names)}")
    require_at_least(1, page_size=page_size)
    require_at_least(
        0,
        window_pages=window_pages,
        tail_pages=tail_pages,
        num_window_pages=num_window_pages,
        heal_tokens=heal_tokens,
    )
    if name == "lru":
        return PlainLru()
    if name == "tail":
        return TailKeepingLru(window_pages, tail_pages=tail_pages)
    return MarginalLoss(
        window_pages,
        tail_pages=tail_pages,
        page_size=page_size,
        heal_tokens=heal_tokens,
        half_life_lookups=max(16.0, num_window_pages / max(1, window_pages + tail_pages)),
    )
