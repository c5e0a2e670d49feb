"""The slow truth beside the prefix cache: a flat log of published pages, and a token-by-token idea of a usable prefix.

Nothing here knows of trees. A published page is an entry under its chained key; a sequence references the entries whose
windows it still reads; an entry's window goes when nobody references it and no anchor keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy

__all__ = ["Entry", "OracleRow", "PrefixOracle", "brute_force_hit", "contents"]


@dataclass
class Entry:
    """One published page."""

    parent: bytes | None = None
    has_window: bool = False
    anchored: bool = False
    refs: int = 0


@dataclass
class OracleRow:
    """What one sequence holds, by key and page index."""

    num_prompt_tokens: int
    num_committed_tokens: int = 0
    num_published: int = 0
    window_start: int = 0
    keys: list[bytes] = field(default_factory=list)
    references: set[int] = field(default_factory=set)
    junctions: set[int] = field(default_factory=set)


def contents(cache: PrefixCache) -> dict[bytes, tuple[int, int | None]]:
    """Key -> (full page, window page or None), read off the tree."""
    found: dict[bytes, tuple[int, int | None]] = {}
    for node in cache._ledger.tree.nodes.values():
        for offset, key in enumerate(node.keys):
            assert key not in found, "a key is twice in the tree"
            found[key] = (node.full_pages[offset], node.window_page(node.start + offset))
    return found


def brute_force_hit(
    live: dict[bytes, bool], keys: Sequence[bytes], num_tokens: int, *, page_size: int, window_tokens: int
) -> int:
    """Largest page-aligned p < num_tokens with full KV on [0, p) and windows on [max(0, p - W), p), token by token."""
    for p in range(num_tokens - 1, 0, -1):
        if p % page_size or p // page_size > len(keys):
            continue
        full = all(keys[t // page_size] in live for t in range(p))
        if full and all(live[keys[t // page_size]] for t in range(max(0, p - window_tokens), p)):
            return p
    return 0


class PrefixOracle:
    """Mirrors begin / commit / finish / abort on a flat dictionary."""

    def __init__(self, *, page_size: int, window_tokens: int, retention: RetentionPolicy) -> None:
        self.page_size = page_size
        self.window_tokens = window_tokens
        self.retention = retention
        self.entries: dict[bytes, Entry] = {}

    @property
    def live(self) -> dict[bytes, bool]:
        return {key: entry.has_window for key, entry in self.entries.items()}

    def hit(self, keys: Sequence[bytes], num_tokens: int) -> int:
        return brute_force_hit(self.live, keys, num_tokens, page_size=self.page_size, window_tokens=self.window_tokens)

    def begin(self, keys: Sequence[bytes], num_tokens: int, hit_tokens: int, *, with_window: bool = True) -> OracleRow:
        num_pages = hit_tokens // self.page_size
        row = OracleRow(num_tokens, hit_tokens, num_pages, num_pages, list(keys[:num_pages]))
        full_only = brute_force_hit(
            dict.fromkeys(self.entries, True), keys, num_tokens, page_size=self.page_size, window_tokens=0
        )
        if (
            self.retention.learns_branches
            and full_only - self.hit(keys, num_tokens) >= self.retention.learning_threshold_tokens
        ):
            row.junctions.add(full_only // self.page_size)
        if with_window and self.window_tokens:
            row.window_start = max(0, hit_tokens - self.window_tokens) // self.page_size
            for index in range(row.window_start, num_pages):
                self._refer(row, index)
                self.entries[row.keys[index]].anchored = True
        return row

    def reopen(self, row: OracleRow, window_start: int) -> None:
        """The sequence drops its windows and will write those from `window_start` on."""
        self._release_below(row, row.num_published)
        row.window_start = window_start

    def commit(self, row: OracleRow, num_tokens: int, keys: Sequence[bytes]) -> None:
        previous, row.num_committed_tokens = row.num_committed_tokens, num_tokens
        self._note_parting(row, keys[: num_tokens // self.page_size])
        row.keys = list(keys[: num_tokens // self.page_size])
        row.num_published = len(row.keys)
        for index, key in enumerate(row.keys):
            entry = self.entries.setdefault(key, Entry(row.keys[index - 1] if index else None))
            if self.window_tokens and index >= row.window_start and index not in row.references:
                entry.has_window = True
                self._refer(row, index)
        self._anchor_commit(row, previous)
        self._release_below(row, self.frontier(num_tokens))

    def finish(self, row: OracleRow, *, aborted: bool) -> None:
        if not aborted:
            self._anchor_window(row, row.num_published, extra=self.retention.tail_pages)
        self._release_below(row, row.num_published)

    def frontier(self, num_tokens: int) -> int:
        """Lowest page touched by the window of the end's boundary, less the tail."""
        end = num_tokens // self.retention.release_interval_tokens * self.retention.release_interval_tokens
        boundary = end // self.page_size * self.page_size
        return max(0, (boundary - self.window_tokens) // self.page_size - self.retention.tail_pages)

    def forget(self, held: dict[bytes, tuple[int, int | None]]) -> None:
        """After an eviction: keep what the cache still has, having checked that only unreferenced things went."""
        assert set(held) <= set(self.entries), "the cache holds pages nobody published"
        for key in list(self.entries):
            entry = self.entries[key]
            if key not in held:
                assert entry.refs == 0, "a page whose window is in use was evicted"
                del self.entries[key]
                continue
            has_window = held[key][1] is not None
            assert entry.has_window or not has_window, "a window came from nowhere"
            assert has_window or entry.refs == 0, "a window in use was evicted"
            if not has_window:
                entry.has_window = entry.anchored = False

    def _refer(self, row: OracleRow, index: int) -> None:
        row.references.add(index)
        self.entries[row.keys[index]].refs += 1

    def _release_below(self, row: OracleRow, frontier: int) -> None:
        for index in sorted(row.references):
            if index < frontier:
                row.references.discard(index)
                entry = self.entries[row.keys[index]]
                entry.refs -= 1
                if entry.refs == 0 and not entry.anchored:
                    entry.has_window = False
        row.window_start = max(row.window_start, frontier)

    def _note_parting(self, row: OracleRow, keys: Sequence[bytes]) -> None:
        """The first page nobody has published, after one that somebody has continued otherwise."""
        new = next((index for index, key in enumerate(keys) if key not in self.entries), 0)
        parted = any(entry.parent == keys[new - 1] for entry in self.entries.values()) if new else False
        if parted and self.retention.learns_branches:
            row.junctions.add(new)

    def _anchor_commit(self, row: OracleRow, previous: int) -> None:
        policy, page_size, now, prompt = self.retention, self.page_size, row.num_committed_tokens, row.num_prompt_tokens
        for boundary in range(previous // page_size + 1, now // page_size + 1):
            if (boundary - 1) * page_size < policy.dense_retention_tokens:
                self._anchor_pages(row, boundary - 1, boundary)
            is_long = row.num_prompt_tokens >= policy.long_prompt_tokens
            stride_tokens = policy.long_stride_tokens if is_long else policy.retention_stride_tokens
            stride = max(1, stride_tokens // page_size) if stride_tokens else 0
            if stride and boundary % stride == 0:
                self._anchor_window(row, boundary)
        if policy.at_chunk_ends and now <= prompt:
            self._anchor_window(row, now // page_size)
        if previous < prompt <= now:
            self._anchor_window(row, prompt // page_size, extra=policy.tail_pages)
        for boundary in [junction for junction in row.junctions if junction <= row.num_published]:
            row.junctions.discard(boundary)
            first = max(0, boundary * page_size - self.window_tokens) // page_size
            if row.window_start <= first:
                self._anchor_window(row, boundary)

    def _anchor_window(self, row: OracleRow, boundary: int, extra: int = 0) -> None:
        first = max(0, boundary * self.page_size - self.window_tokens) // self.page_size
        self._anchor_pages(row, first - extra, boundary)

    def _anchor_pages(self, row: OracleRow, start: int, stop: int) -> None:
        for index in range(max(0, start), stop):
            if index in row.references:
                self.entries[row.keys[index]].anchored = True
