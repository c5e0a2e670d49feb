"""Work per step does not grow with the tree: looks at nodes are counted, in a small tree and in a large one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from epd.cache.ledger import TreeLedger
from epd.cache.radix import Node
from epd.cache.retention import RetentionPolicy
from epd.kv.pages import PageOwner
from tests.fakes.cache_driver import CacheDriver

WINDOW_PAGES = 3


@dataclass
class Forest:
    """A tree made by hand: serving so many requests would take minutes."""

    num_nodes: int
    driver: CacheDriver = field(init=False)
    names: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        retention = RetentionPolicy(retention_stride_tokens=0, at_chunk_ends=False)
        num_pages = 4 * self.num_nodes + 1000
        self.driver = CacheDriver(1, WINDOW_PAGES, num_pages, num_pages, retention, checks=False)

    @property
    def ledger(self) -> TreeLedger:
        return self.driver.cache._ledger

    def grow(self, parent: Node, *, num_pages: int, num_windows: int) -> Node:
        keys = [next(self.names).to_bytes(16, "big") for _ in range(num_pages)]
        grant = self.driver.pool.allocate(num_pages, num_windows)
        self.driver.pool.full.hand_over(grant.full_pages, PageOwner.SEQUENCE, PageOwner.TREE)
        self.driver.pool.window.hand_over(grant.window_pages, PageOwner.SEQUENCE, PageOwner.TREE)
        node = self.ledger.tree.add_child(parent, keys, grant.full_pages, grant.window_pages)
        node.heat = 1.0
        self.ledger.anchored.update(grant.window_pages)
        return node

    def settle(self) -> list[list[bytes]]:
        """Queue everything, and fill the pools; returns the keys of some paths."""
        for node in self.ledger.tree.nodes.values():
            self.ledger.refresh(node)
        free = self.driver.pool
        free.allocate(max(0, free.full.num_free - 8), max(0, free.window.num_free - 8))
        tree = self.ledger.tree
        ends = itertools.islice((node for node in tree.nodes.values() if node.is_leaf), 20)
        return [[key for above in reversed(list(tree.upwards(end))) for key in above.keys] for end in ends]


def wide(num_nodes: int) -> Forest:
    """One beginning and as many sessions behind it, so short that their ends lean on the windows of the beginning."""
    forest = Forest(num_nodes)
    shared = forest.grow(forest.ledger.tree.root, num_pages=8, num_windows=4)
    for _ in range(num_nodes):
        forest.grow(shared, num_pages=2, num_windows=2)
    return forest


def deep(num_nodes: int) -> Forest:
    """One path that parts at every second page, nothing to resume from on it, and a short session at each parting."""
    forest = Forest(num_nodes)
    node = forest.ledger.tree.root
    for _ in range(num_nodes // 2):
        node = forest.grow(node, num_pages=2, num_windows=0)
        forest.grow(node, num_pages=2, num_windows=1)
    return forest


def comb(num_nodes: int, *, order: str) -> Forest:
    """One path that parts at every page, live windows all along it, and a page of another session at each parting.

    `order`: which of these were used last: the deepest, the shallowest, or any.
    """
    forest = Forest(num_nodes)
    node, teeth = forest.ledger.tree.root, []
    for _ in range(num_nodes // 2):
        node = forest.grow(node, num_pages=1, num_windows=1)
        teeth.append(forest.grow(node, num_pages=1, num_windows=1))
    if order == "any":
        random.Random(3).shuffle(teeth)
    for access, tooth in enumerate(reversed(teeth) if order == "shallowest" else teeth, start=1):
        tooth.access = access
    return forest


@dataclass
class Looks:
    """Reads of a node's place or state."""

    num: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    looks = Looks()

    def counting(read: Callable[[Node], object]) -> property:
        def looked(node: Node) -> object:
            looks.num += 1
            return read(node)

        return property(looked)

    with monkeypatch.context() as patch:
        for name in ("stop", "num_pages", "window_start", "is_leaf", "is_protected"):
            read = getattr(Node, name).fget
            patch.setattr(Node, name, counting(read))
        yield looks


def most_looks(forest: Forest, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most that one of many steps of each kind looked at."""
    paths = forest.settle()
    cache, ledger, driver = forest.driver.cache, forest.ledger, forest.driver
    (top,) = ledger.tree.root.children.values()

    def serve(step: int) -> None:
        keys = [*paths[step % len(paths)][:6], *(b"new%d/%d" % (step, page) for page in range(8))]
        pages = cache.begin(keys, len(keys))
        driver.advance(pages, keys, len(keys))
        pages.finish()

    def match(step: int) -> None:
        cache.match(paths[step % len(paths)][:8], 9)

    most = {}
    steps: dict[str, Callable[[int], object]] = {
        "match": match,
        "serve": serve,
        "evict_window": lambda _: ledger.evict_window(3),
        "evict_full": lambda _: ledger.evict_full(3),
        "windows_changed": lambda _: ledger.windows_changed(top),
    }
    with counted(monkeypatch) as looks:
        for name, act in steps.items():
            most[name] = 0
            for step in range(60):
                before = looks.num
                act(step)
                most[name] = max(most[name], looks.num - before)
    return most


@pytest.mark.parametrize(("make", "num_large"), [(wide, 100_000), (deep, 30_000)])
def test_a_step_looks_at_as_few_nodes_in_a_large_tree_as_in_a_small(
    make: Callable[[int], Forest], num_large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (most_looks(make(num_nodes), monkeypatch) for num_nodes in (1_000, num_large))
    assert large["match"] <= 60
    for name, most in small.items():
        assert large[name] <= 1.5 * most + 50, f"{name}: {most} in a small tree, {large[name]} in a large one"
        assert large[name] <= 20_000


@pytest.mark.parametrize("order", ["deepest", "shallowest", "any"])
def test_a_large_eviction_costs_so_much_per_page(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may need most of the pool: nodes it empties are looked at when they go, not at each loss nearby."""
    for num_nodes in (1_200, 12_000):
        forest = comb(num_nodes, order=order)
        forest.settle()
        wanted = num_nodes * 5 // 6
        with counted(monkeypatch) as looks:
            assert forest.ledger.evict_full(wanted) == wanted
        assert looks.num <= 30 * wanted, f"{looks.num / wanted:.1f} looks per page in a tree of {num_nodes} nodes"
        forest.ledger.tree.check()
        forest.ledger.check_victims()


def test_a_large_eviction_of_windows_costs_so_much_per_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than full pages: what a window is worth depends on the nodes around, each time one of them goes."""
    for num_nodes in (1_200, 6_000):
        forest = comb(num_nodes, order="any")
        forest.settle()
        with counted(monkeypatch) as looks:
            assert forest.ledger.evict_window(num_nodes // 2) == num_nodes // 2
        assert looks.num <= 400 * num_nodes // 2


@pytest.mark.parametrize("order", ["deepest", "shallowest", "any"])
def test_a_large_eviction_leaves_what_many_small_ones_leave(order: str) -> None:
    left = []
    for step in (1, 500):
        forest = comb(600, order=order)
        forest.settle()
        assert sum(forest.ledger.evict_full(step) for _ in range(500 // step)) == 500
        left.append(sorted(page for node in forest.ledger.tree.nodes.values() for page in node.full_pages))
    assert left[0] == left[1]


def test_a_path_of_thousands_of_nodes_is_walked_without_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length in pages is what a lookup of all of it costs, and eviction takes it down leaf by leaf."""
    forest = deep(6_000)
    forest.settle()
    tree = forest.ledger.tree
    end = max(tree.nodes.values(), key=lambda node: node.stop)
    keys = [key for above in reversed(list(tree.upwards(end))) for key in above.keys]
    with counted(monkeypatch) as looks:
        assert forest.driver.cache.match(keys, len(keys) + 1).num_full_only_tokens == len(keys)
    assert looks.num <= 20 * len(keys)
    assert forest.driver.cache.clear() > 0
    assert len(tree.nodes) == 1
