"""The invariants of the cache, one class each: where it looks, and what must hold there.

Long because the properties stand next to each other, each told whole; a test switches on one of them at a time.
"""

from __future__ import annotations

from collections import Counter

from epd.cache.lru import Rank
from epd.cache.radix import Node
from epd.kv.pages import PageOwner, PagePool
from tests.cache.properties.schedule import Op, Step
from tests.cache.properties.world import Before, Invariant, Run, Text, World

__all__ = ["INVARIANTS", "fingerprint", "nodes_of"]


def nodes_of(world: World) -> list[Node]:
    return list(world.cache._ledger.tree.nodes.values())


def fingerprint(world: World) -> tuple[object, ...]:
    """Everything a lookup must not change: books, structure, page ids, locks, references, recency."""
    ledger, pool = world.cache._ledger, world.pool
    nodes = tuple(
        (
            node.node_id,
            tuple(node.keys),
            tuple(node.full_pages),
            tuple(node.window_pages),
            (node.num_locks, node.holders, node.access, node.window_access, node.heat, node.heat_at, node.credit),
            tuple(child.node_id for child in node.children.values()),
        )
        for node in nodes_of(world)
    )
    free = tuple(pool.full._free), tuple(pool.window._free)
    return world.cache.stats(), nodes, free, tuple(sorted(ledger.refs.items())), tuple(sorted(ledger.anchored))


def rows_hold(world: World) -> tuple[set[int], set[int]]:
    """Full and window pages that some row names."""
    full, window = set[int](), set[int]()
    for run in world.runs:
        full.update(run.pages.full_pages)
        window.update(run.pages.window_pages)
    return full, window


class Conservation(Invariant):
    """Per pool free + evictable + leased = total, each counted by itself, after every step."""

    def after(self, world: World, step: Step) -> None:
        stats = world.cache.stats()
        for pool, named, held in zip(
            (world.pool.full, world.pool.window), (stats.full, stats.window), rows_hold(world), strict=True
        ):
            tree = pool.num_pages - pool._owners.count(PageOwner.FREE) - pool._owners.count(PageOwner.SEQUENCE)
            tree_held = sum(pool._owners[page] == PageOwner.TREE for page in held)
            assert named.free == pool._owners.count(PageOwner.FREE) == len(pool._free)
            assert named.leased == len(held)
            assert named.evictable == tree - tree_held
            assert named.free + named.evictable + named.leased == named.total == pool.num_pages


class Books(Invariant):
    """The cache's own audit finds nothing wrong after any step."""

    def after(self, world: World, step: Step) -> None:
        world.cache.check()


class OneOwner(Invariant):
    """Every page is exactly once in: the free list, a node of the tree, a row that owns it."""

    def after(self, world: World, step: Step) -> None:
        nodes = nodes_of(world)
        self._once(
            world.pool.full,
            [page for node in nodes for page in node.full_pages],
            [page for run in world.runs for page in run.pages.full_pages[run.pages.num_published_pages :]],
        )
        owners = world.pool.window._owners
        self._once(
            world.pool.window,
            [page for node in nodes for page in node.window_pages],
            [page for run in world.runs for page in run.pages.window_pages if owners[page] != PageOwner.TREE],
        )

    def _once(self, pool: PagePool, tree: list[int], rows: list[int]) -> None:
        assert sorted([*pool._free, *tree, *rows]) == list(range(pool.num_pages)), (
            f"{pool.name}: a page is lost or held twice"
        )


class LeasesLive(Invariant):
    """What a row names is live and stays the same page: no eviction, no clearing, no other request touches it."""

    def after(self, world: World, step: Step) -> None:
        full, window = world.pool.full._owners, world.pool.window._owners
        for run in world.runs:
            pages = run.pages
            published = pages.num_published_pages
            assert all(full[page] == PageOwner.TREE for page in pages.full_pages[:published])
            assert all(full[page] == PageOwner.SEQUENCE for page in pages.full_pages[published:])
            assert all(window[page] != PageOwner.FREE for page in pages.window_pages)

    def before(self, world: World, step: Step) -> None:
        self._leased = [(run, run.pages.full_pages[: run.pages.num_published_pages]) for run in world.runs]

    def on_evict(self, world: World, window: bool, wanted: int, freed: int) -> None:
        for run, leased in self._leased:
            if run.pages.is_open:
                assert run.pages.full_pages[: len(leased)] == leased


class Content(Invariant):
    """Read back over a row, every slot holds what its token wrote: all of full KV, and the last window at least."""

    def after(self, world: World, step: Step) -> None:
        size, window_tokens = world.page_size, world.window_tokens
        for run in world.runs:
            pages, tags, committed = run.pages, run.tags, run.pages.num_committed_tokens
            read: list[int] = []
            for page in pages.full_pages[: -(-committed // size)]:
                read += world.full_tags[page * size : (page + 1) * size]
            assert read[:committed] == tags[:committed], "full KV of a row is another's"
            if not window_tokens or (run.was_handed and not committed):
                continue
            first = pages.window_start * size
            # A row that leases without windows has none until they are written.
            assert first <= max(0, committed - window_tokens), "the last window is not whole"
            read = []
            for page in pages.window_pages[: -(-committed // size) - pages.window_start]:
                read += world.window_tags[page * size : (page + 1) * size]
            assert read[: committed - first] == tags[first:committed], "window KV of a row is another's"


class HitContent(Invariant):
    """Whatever the tree would give to anybody is what its token wrote: every live page, whoever may come to look."""

    def after(self, world: World, step: Step) -> None:
        size = world.page_size
        for text, keys, hit in world.lookups():
            tags = world.tags(text)
            for index in range(hit.num_full_only_tokens // size):
                entry, expected = world.log.entries[keys[index]], tags[index * size : (index + 1) * size]
                assert world.full_tags[entry.full * size : (entry.full + 1) * size] == expected
                if entry.window is not None:
                    assert world.window_tags[entry.window * size : (entry.window + 1) * size] == expected
                    self.num_cases += 1


class WindowUse(Invariant):
    """A row holds at most W + chunk + drafts + release interval window pages, rounded up, and its tail pages."""

    def after(self, world: World, step: Step) -> None:
        for run in world.runs:
            assert len(run.pages.window_pages) <= world.window_limit(run)


class Sound(Invariant):
    """A hit is a page multiple below the prompt's length, with full KV on all and window KV on the last W of it."""

    def after(self, world: World, step: Step) -> None:
        for text, keys, hit in world.lookups():
            assert hit.num_tokens % world.page_size == 0
            assert 0 <= hit.num_tokens <= hit.num_full_only_tokens <= max(0, len(text) - 1)
            assert world.log.is_sound(keys, hit.num_tokens), "a hit on pages that are not there"
            self.num_cases += hit.num_tokens > 0


class Maximal(Invariant):
    """A hit is the brute-force hit over what was inserted less what went: not a page shorter."""

    def after(self, world: World, step: Step) -> None:
        for text, keys, hit in world.lookups():
            reach = min(world.log.full_run(keys), (len(text) - 1) // world.page_size)
            assert hit.num_tokens == world.log.longest(keys, len(text))
            assert hit.num_full_only_tokens == reach * world.page_size
            self.num_cases += hit.num_tokens < hit.num_full_only_tokens

    def on_begin(self, world: World, run: Run, limit_tokens: int, full_only: bool) -> None:
        keys = run.keys
        expected = world.log.longest(keys, limit_tokens)
        if full_only:
            expected = min(world.log.full_run(keys), max(0, limit_tokens - 1) // world.page_size) * world.page_size
        assert run.pages.num_cached_tokens == expected


class NothingGoesUnasked(Invariant):
    """Full pages leave the tree for evictions alone, never while it could have given others that nobody uses."""

    def before(self, world: World, step: Step) -> None:
        self._counted = world.cache.stats().num_evicted_full_pages, len(world.log.entries)

    def after(self, world: World, step: Step) -> None:
        evicted, entries = self._counted
        if step.op not in (Op.CONDEMN, Op.CLEAR) and world.cache.stats().num_evicted_full_pages == evicted:
            assert len(world.log.entries) >= entries, "a full page went though nothing was evicted"


class InsertNeverLowers(Invariant):
    """A whole request served without an eviction lowers nobody's hit."""

    def before(self, world: World, step: Step) -> None:
        self._hits = {}
        if step.op is Op.SERVE:
            self._hits = {text: self._hit(world, text) for text in world.texts}
            self._evicted = self._num_evicted(world)

    def after(self, world: World, step: Step) -> None:
        if self._hits and self._evicted == self._num_evicted(world):
            self.num_cases += 1
            for text, hit in self._hits.items():
                assert self._hit(world, text) >= hit

    def _hit(self, world: World, text: Text) -> int:
        return world.cache.match(world.keys(text), len(text)).num_tokens

    def _num_evicted(self, world: World) -> int:
        stats = world.cache.stats()
        return stats.num_evicted_full_pages + stats.num_evicted_window_pages


class LooksArePure(Invariant):
    """match(), fits(), stats(), check(), window_frontier() and pages_needed() change nothing anybody can see."""

    def before(self, world: World, step: Step) -> None:
        text = world.texts[step.a % len(world.texts)]
        keys, seen = world.keys(text), fingerprint(world)
        world.cache.match(keys, len(text))
        world.cache.fits(step.b % 9, step.c % 9, keys=keys, num_tokens=len(text))
        world.cache.window_frontier(step.c)
        world.cache.check()
        for run in world.runs:
            run.pages.pages_needed(len(run.atoms) + step.b % 9)
        assert fingerprint(world) == seen
        assert keys == world.keys(text)


class NamespacesApart(Invariant):
    """Two requests share pages exactly when namespace, text and media agree: no more than was ever published there."""

    def after(self, world: World, step: Step) -> None:
        for text, _, hit in world.lookups():
            other = Text(1 - text.namespace, text.atoms)
            elsewhere = world.cache.match(world.keys(other), len(other))
            for one, reach in ((text, hit.num_full_only_tokens), (other, elsewhere.num_full_only_tokens)):
                assert not reach or (one.namespace, one.atoms[:reach]) in world.inserted
            self.num_cases += hit.num_full_only_tokens != elsewhere.num_full_only_tokens


class JointNotMinimum(Invariant):
    """A hit is at most each pool's own; with a window as long as the prompt it is the shorter of both runs from 0."""

    def after(self, world: World, step: Step) -> None:
        tree, log, size = world.cache._ledger.tree, world.log, world.page_size
        for _, keys, hit in world.lookups():
            shorter = min(log.full_run(keys), log.window_run(keys))
            assert tree.walk(keys, stop=len(keys), window_pages=len(keys) + 1).usable_pages == shorter
            assert hit.num_tokens <= log.full_run(keys) * size
            self.num_cases += hit.num_tokens > shorter * size


class NarrowerHitsMore(Invariant):
    """For one state, a narrower window never hits less."""

    def after(self, world: World, step: Step) -> None:
        tree = world.cache._ledger.tree
        for _, keys, _ in world.lookups():
            hits = [
                tree.walk(keys, stop=len(keys), window_pages=width).usable_pages
                for width in range(world.cache.window_pages + 3)
            ]
            assert hits == sorted(hits, reverse=True)
            self.num_cases += hits[0] > hits[-1]


class InsertThenMatch(Invariant):
    """What was committed is found at once: by a longer prompt to its last page, by the same prompt to the page before.

    With a second tail page (draft layers drop a page of a hit) by a prompt one page shorter as well.
    """

    def on_commit(self, world: World, run: Run, before: Before) -> None:
        self._found(world, run, run.pages.num_committed_tokens, run.pages.window_start)

    def on_end(self, world: World, run: Run, before: Before, aborted: bool) -> None:
        if not aborted and not run.is_reopened:
            self._found(world, run, before.num_committed, before.window_start)

    def _found(self, world: World, run: Run, num_tokens: int, window_start: int) -> None:
        size, keys = world.page_size, run.keys
        boundary = num_tokens // size
        # A row that was handed its window has no page before it yet, one that leased without windows has none at all.
        whole = not world.window_tokens or window_start <= max(0, boundary - world.cache.window_pages)
        if run.is_condemned or not whole or num_tokens == 0:
            return
        assert world.cache.match(keys, boundary * size + 1).num_tokens == boundary * size
        self.num_cases += 1
        if run.was_handed:
            return
        for less in range(1, 1 + world.setting.retention.tail_pages):
            asked = max(0, boundary - less)
            if asked >= run.num_leased_pages:
                assert world.cache.match(keys, asked * size + 1).num_tokens == asked * size, (
                    "an identical resend misses"
                )


class CommitAccounts(Invariant):
    """Every page a row gave to a commit was adopted, given back, or is still the row's: adopted are the whole pages."""

    def on_commit(self, world: World, run: Run, before: Before) -> None:
        pages, size = run.pages, world.page_size
        committed = pages.num_committed_tokens // size
        assert pages.num_published_pages == committed
        assert pages.full_pages[committed:] == before.full_pages[committed:]
        full, window = world.pool.full._owners, world.pool.window._owners
        tree = {page for node in nodes_of(world) for page in node.full_pages}
        for index in range(before.num_published, committed):
            given, kept = before.full_pages[index], pages.full_pages[index]
            assert kept in tree
            assert full[kept] == PageOwner.TREE
            assert given == kept or full[given] == PageOwner.FREE, "a duplicate was neither adopted nor given back"
        for index in range(before.window_start, before.window_start + len(before.window_pages)):
            given_window, named = before.window(index), pages.window_page(index)
            assert given_window is not None
            if index >= committed:
                assert named == given_window or index < pages.window_start
                assert window[given_window] == (PageOwner.SEQUENCE if named is not None else PageOwner.FREE)
            elif named is not None:
                assert window[named] == PageOwner.TREE
                assert named == given_window or window[given_window] == PageOwner.FREE


class EndOnce(Invariant):
    """A second end does nothing, and an end frees everything that was not adopted."""

    def on_end(self, world: World, run: Run, before: Before, aborted: bool) -> None:
        seen = fingerprint(world)
        run.pages.finish()
        run.pages.abort()
        assert fingerprint(world) == seen
        full = world.pool.full._owners
        assert all(full[page] == PageOwner.FREE for page in before.full_pages[before.num_published :])
        assert not run.pages.full_pages
        assert not run.pages.window_pages
        assert not any(
            world.pool.window._owners[page] == PageOwner.SEQUENCE
            for page in before.window_pages
            if not any(page in other.pages.window_pages for other in world.runs)
        )


class JointAllocation(Invariant):
    """Room is given in both pools or in neither, and exactly when there is enough; a refusal changes nothing."""

    def before(self, world: World, step: Step) -> None:
        self._remember(world)

    def _remember(self, world: World) -> None:
        stats = world.cache.stats()
        self._seen = fingerprint(world)
        self._room = stats.full.free + stats.full.evictable, stats.window.free + stats.window.evictable

    def on_begin(self, world: World, run: Run, limit_tokens: int, full_only: bool) -> None:
        self._remember(world)

    def on_commit(self, world: World, run: Run, before: Before) -> None:
        self._remember(world)

    def on_extend(self, world: World, run: Run, needed: tuple[int, int], before: Before, granted: bool) -> None:
        pages = run.pages
        assert granted == all(want <= room for want, room in zip(needed, self._room, strict=True))
        if not granted:
            self.num_cases += 1
            assert fingerprint(world) == self._seen
            assert Before.of(pages) == before
            return
        assert len(pages.full_pages) == len(before.full_pages) + needed[0]
        if world.window_tokens:
            assert pages.window_start + len(pages.window_pages) == len(pages.full_pages)
        self._remember(world)


class LeaseUndone(Invariant):
    """A lease given back at once restores what can be evicted, to the page."""

    def before(self, world: World, step: Step) -> None:
        stats = world.cache.stats()
        self._pools = stats.full, stats.window

    def after(self, world: World, step: Step) -> None:
        if step.op is Op.PROBE:
            stats = world.cache.stats()
            assert (stats.full, stats.window) == self._pools
            self.num_cases += 1


class CountersReturn(Invariant):
    """When every run has ended, in whatever order, no lock, reference or lease is left, and clearing frees all."""

    def at_end(self, world: World) -> None:
        ledger, stats = world.cache._ledger, world.cache.stats()
        assert (stats.full.leased, stats.window.leased, stats.num_sequences) == (0, 0, 0)
        assert not ledger.refs
        assert ledger.tree.num_protected_pages == 0
        assert not any(node.num_locks or node.holders for node in nodes_of(world))
        world.cache.clear()
        world.cache.check()
        assert len(ledger.tree.nodes) == 1
        assert (world.pool.full.num_free, world.pool.window.num_free) == (
            world.setting.num_full_pages,
            world.setting.num_window_pages,
        )


class NoOrphans(Invariant):
    """Evicting windows frees no full page; evicting full pages leaves no window page without its full page."""

    def before(self, world: World, step: Step) -> None:
        self._free = world.pool.full.num_free

    def on_evict(self, world: World, window: bool, wanted: int, freed: int) -> None:
        if window:
            assert world.pool.full.num_free == self._free

    def after(self, world: World, step: Step) -> None:
        held = 0
        for node in nodes_of(world):
            assert len(node.window_pages) <= len(node.full_pages) == len(node.keys)
            held += len(node.window_pages)
        assert held == world.pool.window.count(PageOwner.TREE)


class EvictionEnough(Invariant):
    """evict(n) frees min(n, evictable) pages in the pool it was asked in, where evictable is what no row names."""

    def before(self, world: World, step: Step) -> None:
        held = rows_hold(world)
        self._evictable = [
            pool.count(PageOwner.TREE) - sum(pool._owners[page] == PageOwner.TREE for page in named)
            for pool, named in zip((world.pool.full, world.pool.window), held, strict=True)
        ]
        self._free = world.pool.full.num_free, world.pool.window.num_free

    def on_evict(self, world: World, window: bool, wanted: int, freed: int) -> None:
        assert freed == min(wanted, self._evictable[window])
        self.num_cases += freed > 0
        pool = world.pool.window if window else world.pool.full
        assert pool.num_free == self._free[window] + freed

    def after(self, world: World, step: Step) -> None:
        if step.op is Op.CLEAR:
            stats = world.cache.stats()
            assert (stats.full.evictable, stats.window.evictable) == (0, 0)


class DeadWeight(Invariant):
    """Evicting windows changes no hit whose own last W tokens they are not: dead weight goes unnoticed."""

    def on_evict(self, world: World, window: bool, wanted: int, freed: int) -> None:
        if not window or not freed:
            return
        # The log does not know of this eviction yet: it is the state before.
        log, size, pages = world.log, world.page_size, world.cache.window_pages
        gone = {log.key_of_window(page) for page in world.window_pages_gone()}
        for text in dict.fromkeys(world.texts):
            keys = world.keys(text)
            hit = log.longest(keys, len(text))
            boundary = hit // size
            if gone.isdisjoint(keys[max(0, boundary - pages) : boundary]):
                assert world.cache.match(keys, len(text)).num_tokens == hit
                self.num_cases += hit > 0


class Recency(Invariant):
    """A lookup changes the ranks of window victims near its end and of no other: busy branches pin no ancestor.

    Near is the last W + P tokens, and the W before them where a policy values what their own boundaries need.
    """

    def before(self, world: World, step: Step) -> None:
        text, cache = world.texts[step.a % len(world.texts)], world.cache
        shape, ranks = self._shape(world), self._ranks(world)
        pages = cache.begin(world.keys(text), len(text))
        end = pages.num_cached_tokens // world.page_size
        path = {node.node_id for node in cache._ledger.tree.upwards(pages.node)}
        pages.abort()
        if self._shape(world) != shape:
            # The lease cut a node for good: ranks of other nodes are no longer those of the same pages.
            return
        floor = end - 2 * cache.window_pages - 1
        for node in nodes_of(world):
            if node.node_id in ranks and not floor < node.stop < end + node.num_pages:
                before, after = ranks[node.node_id], cache._ledger._policy.window_rank(node)
                self.num_cases += node.node_id in path
                # A key that decays is a rounded logarithm: a step up or down is no change.
                assert before[0] == after[0]
                assert abs(before[1] - after[1]) <= 1, "a lookup moved a victim far from its end"

    def _shape(self, world: World) -> list[tuple[int, int, int]]:
        return [(node.node_id, node.num_pages, len(node.window_pages)) for node in nodes_of(world)]

    def _ranks(self, world: World) -> dict[int, Rank]:
        rank = world.cache._ledger._policy.window_rank
        return {node.node_id: rank(node) for node in nodes_of(world) if node.window_pages}


class HeldCounts(Invariant):
    """The cache counts sequences and hit tokens as they were, and its counters never fall."""

    def __init__(self) -> None:
        self._counted = Counter[str]()

    def on_begin(self, world: World, run: Run, limit_tokens: int, full_only: bool) -> None:
        self._counted["lookup"] += len(run.atoms)
        self.num_cases += 1
        self._counted["hit"] += run.pages.num_cached_tokens

    def after(self, world: World, step: Step) -> None:
        stats = world.cache.stats()
        assert stats.num_sequences == len(world.runs)
        assert (stats.num_lookup_tokens, stats.num_hit_tokens) == (self._counted["lookup"], self._counted["hit"])


INVARIANTS: dict[str, type[Invariant]] = {
    "free, evictable and leased make the total": Conservation,
    "the audit finds nothing": Books,
    "no page has two owners": OneOwner,
    "leased pages stay live": LeasesLive,
    "a row reads what its tokens wrote": Content,
    "a hit reads what its tokens wrote": HitContent,
    "a row's window use is bounded": WindowUse,
    "a hit is sound": Sound,
    "a hit is the brute-force hit": Maximal,
    "full pages go for evictions alone": NothingGoesUnasked,
    "an insert lowers no hit": InsertNeverLowers,
    "looking changes nothing": LooksArePure,
    "namespaces and media never mix": NamespacesApart,
    "a hit is joint": JointNotMinimum,
    "a narrower window hits no less": NarrowerHitsMore,
    "what was committed is found": InsertThenMatch,
    "a commit accounts for every page": CommitAccounts,
    "a sequence ends once": EndOnce,
    "room in both pools or in neither": JointAllocation,
    "a lease is undone exactly": LeaseUndone,
    "locks and references return to zero": CountersReturn,
    "eviction leaves no orphan": NoOrphans,
    "eviction frees what was asked": EvictionEnough,
    "dead windows carry no hit": DeadWeight,
    "a lookup keeps no ancestor young": Recency,
    "lookups are counted": HeldCounts,
}
