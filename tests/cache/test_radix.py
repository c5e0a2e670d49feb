"""The tree alone: walks against the flat rule, and splits, merges and locks that nobody can observe."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd.cache.radix import Node, RadixTree, common_pages
from epd.cache.window import longest_usable
from epd.kv.errors import PageStateError
from tests.oracles.effort import effort

RUNS = st.lists(st.integers(1, 5).flatmap(lambda pages: st.tuples(st.just(pages), st.integers(0, pages))), max_size=5)


def key(index: int) -> bytes:
    return index.to_bytes(16, "big")


def chain(runs: list[tuple[int, int]]) -> tuple[RadixTree, list[bytes], list[bool], list[Node]]:
    """A path of nodes with (pages, live window pages) each; its keys, and which pages' windows are live."""
    tree = RadixTree()
    node, keys, live, nodes = tree.root, [], [], []
    for num_pages, num_windows in runs:
        run = [key(len(keys) + offset) for offset in range(num_pages)]
        pages = list(range(len(keys), len(keys) + num_pages))
        node = tree.add_child(node, run, pages, pages[num_pages - num_windows :])
        keys += run
        live += [offset >= num_pages - num_windows for offset in range(num_pages)]
        nodes.append(node)
    return tree, keys, live, nodes


@effort(200)
@given(runs=RUNS, window_pages=st.integers(0, 6))
def test_walk_equals_the_flat_rule_at_every_length(runs: list[tuple[int, int]], window_pages: int) -> None:
    tree, keys, live, _ = chain(runs)
    tree.check()
    for stop in range(len(keys) + 1):
        walk = tree.walk(keys, stop=stop, window_pages=window_pages)
        assert walk.num_pages == stop
        assert walk.usable_pages == longest_usable(live, window_pages, stop)
        strays = [*keys[:stop], b"elsewhere"]
        assert tree.walk(strays, stop=len(strays), window_pages=window_pages).usable_pages == walk.usable_pages


@effort(150)
@given(runs=RUNS.filter(bool), data=st.data())
def test_splits_and_merges_cannot_be_observed(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    tree, keys, live, nodes = chain(runs)
    locked = data.draw(st.lists(st.sampled_from(nodes), max_size=2))
    for node in locked:
        tree.lock(node)
    protected = tree.num_protected_pages
    assert protected == max((node.stop for node in locked), default=0)
    for _ in range(4):
        node = data.draw(st.sampled_from([node for node in tree.nodes.values() if node is not tree.root]))
        if data.draw(st.booleans()) and node.num_pages > 1:
            tree.split(node, data.draw(st.integers(1, node.num_pages - 1)))
        else:
            tree.merge_down(node)
        tree.check()
        assert tree.num_protected_pages == protected
        for stop in range(len(keys) + 1):
            walk = tree.walk(keys, stop=stop, window_pages=2)
            assert (walk.num_pages, walk.usable_pages) == (stop, longest_usable(live, 2, stop))
        path = list(tree.path_nodes(keys, len(keys)))
        assert [page for node in path for page in node.full_pages] == list(range(len(keys)))
        assert [node.window_page(index) is not None for node in path for index in range(node.start, node.stop)] == live
    for node in locked:
        tree.unlock(node)
    tree.check()
    assert tree.num_protected_pages == 0


@effort(100)
@given(length=st.integers(0, 20), shared=st.integers(0, 20), start=st.integers(0, 5), stop=st.integers(0, 30))
def test_common_pages_equals_counting(length: int, shared: int, start: int, stop: int) -> None:
    run = [key(index) for index in range(length)]
    keys = [b""] * start + [key(index if index < shared else index + 1000) for index in range(30)]
    stop = max(start, stop)
    expected = 0
    while expected < min(length, stop - start) and run[expected] == keys[start + expected]:
        expected += 1
    assert common_pages(run, keys, start, stop) == expected


def test_locks_are_counted_and_a_locked_leaf_cannot_be_cut() -> None:
    tree, _, _, nodes = chain([(3, 0), (2, 2)])
    tree.lock(nodes[1])
    tree.lock(nodes[1])
    tree.unlock(nodes[1])
    with pytest.raises(PageStateError, match="unprotected leaf"):
        tree.truncate(nodes[1], 1)
    tree.unlock(nodes[1])
    with pytest.raises(PageStateError, match="no lock"):
        tree.unlock(nodes[1])
    with pytest.raises(PageStateError, match="unprotected leaf"):
        tree.truncate(nodes[0], 1)
    assert tree.truncate(nodes[1], 1) == ([4], [4])
    assert tree.truncate(nodes[1], 1) == ([3], [3])
    assert tree.truncate(nodes[0], 3) == ([0, 1, 2], [])
    tree.check()
    assert list(tree.nodes.values()) == [tree.root]
