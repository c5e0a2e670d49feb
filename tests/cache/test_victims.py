"""Marginal loss against brute force: every prompt ever asked is looked up again with and without each candidate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd.cache.boundaries import end_is_usable
from epd.cache.prefix import PrefixCache
from epd.cache.radix import Node
from epd.cache.retention import RetentionPolicy
from epd.cache.victims import MarginalLoss, PlainLru, TailKeepingLru, make_policy
from epd.cache.window import num_window_pages
from epd.config import WindowEviction
from tests.fakes.cache_driver import CacheDriver, text
from tests.oracles.effort import effort
from tests.oracles.prefix_oracle import brute_force_hit, contents

UNUSED = 1 / 32
"""What a boundary weighs that no known prompt ends at."""

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=1, max_size=8)
RETENTIONS = st.builds(
    RetentionPolicy,
    dense_retention_tokens=st.sampled_from([0, 6, 100]),
    retention_stride_tokens=st.sampled_from([0, 3]),
    at_chunk_ends=st.booleans(),
    tail_pages=st.integers(1, 2),
    learning_threshold_tokens=st.just(1),
)


@dataclass
class World:
    """A cache after some requests, and the prompts somebody may send again, with how often."""

    page_size: int
    window_tokens: int
    retention: RetentionPolicy
    heal_tokens: int
    known: dict[tuple[int, ...], int] = field(default_factory=dict)
    pools: tuple[int, int] = (400, 400)

    def __post_init__(self) -> None:
        self.policy = MarginalLoss(
            num_window_pages(self.window_tokens, self.page_size),
            tail_pages=self.retention.tail_pages,
            page_size=self.page_size,
            heal_tokens=self.heal_tokens,
            half_life_lookups=1e12,
        )
        self.driver = CacheDriver(self.page_size, self.window_tokens, *self.pools, self.retention)
        self.driver.cache = PrefixCache(
            self.driver.pool,
            page_size=self.page_size,
            window_tokens=self.window_tokens,
            retention=self.retention,
            policy=self.policy,
        )
        self.ledger = self.driver.cache._ledger

    @property
    def nodes(self) -> list[Node]:
        return [node for node in self.ledger.tree.nodes.values() if node is not self.ledger.tree.root]

    def path(self, node: Node) -> list[bytes]:
        return [key for above in reversed(list(self.ledger.tree.upwards(node))) for key in above.keys]

    def hit(self, live: dict[bytes, bool], keys: list[bytes]) -> int:
        """Tokens, for a prompt that goes on after `keys`."""
        num_tokens = len(keys) * self.page_size + 1
        return brute_force_hit(live, keys, num_tokens, page_size=self.page_size, window_tokens=self.window_tokens)

    def live(self) -> dict[bytes, bool]:
        return {key: pages[1] is not None for key, pages in contents(self.driver.cache).items()}

    def ends(self) -> dict[int, float]:
        """Weight of the known prompts by the page boundary and node they end at; those that end inside a node go."""
        live, weights = self.live(), {node.node_id: 0.0 for node in self.nodes}
        by_key = {node.keys[-1]: node for node in self.nodes}
        for prompt in list(self.known):
            keys = self.driver.keys(list(prompt))
            num_pages = self.hit(live, keys) // self.page_size
            node = by_key.get(keys[num_pages - 1]) if num_pages else None
            if node is not None:
                weights[node.node_id] += self.known[prompt]
            elif num_pages:
                del self.known[prompt]
        return weights

    def settle(self) -> None:
        """Heat is what it should be by definition, as if all prompts had just been looked up."""
        weights = self.ends()
        for node in self.nodes:
            node.heat, node.heat_at = weights[node.node_id], 0
        for node in self.nodes:
            self.ledger.refresh(node)

    def loss(self, node: Node) -> float:
        """Tokens that go when `node` gives what the policy would take from it, by looking everything up again."""
        live = self.live()
        num_pages = self.policy.num_spare_windows(node)
        first = node.window_start - node.start
        without = live | dict.fromkeys(node.keys[first : first + num_pages], False)
        spare = len(node.window_pages) - self.driver.cache.window_pages - self.retention.tail_pages
        if spare > 0:
            # Inside a run: the deepest boundary that goes stands for all of them.
            boundary = node.window_start + self.driver.cache.window_pages + num_pages - 1
            return UNUSED * self._fall(live, without, self.path(node)[:boundary])
        known = [(self.driver.keys(list(prompt)), float(weight)) for prompt, weight in self.known.items()]
        ends = [(self.path(end), UNUSED) for end in self.nodes if end_is_usable(end, self.driver.cache.window_pages)]
        return sum(weight * self._fall(live, without, keys) for keys, weight in known + ends)

    def _fall(self, live: dict[bytes, bool], without: dict[bytes, bool], keys: list[bytes]) -> int:
        before, after = self.hit(live, keys), self.hit(without, keys)
        if self.heal_tokens and before > after:
            # Healing makes up for what is further away. Pages tell how far a prompt reached before and after.
            return min(before - after, self.heal_tokens)
        return before - after


@effort(150)
@given(
    page_size=st.integers(1, 2),
    window_tokens=st.integers(1, 5),
    retention=RETENTIONS,
    heal_tokens=st.sampled_from([0, 0, 4]),
    prompts=PROMPTS,
    weights=st.lists(st.integers(1, 40), min_size=8, max_size=8),
    chunk=st.integers(1, 9),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    num_open=st.integers(0, 2),
)
def test_the_cheapest_window_goes_and_its_lookups_end_at_the_next(
    page_size: int,
    window_tokens: int,
    retention: RetentionPolicy,
    heal_tokens: int,
    prompts: list[list[int]],
    weights: list[int],
    chunk: int,
    steps: list[int],
    num_open: int,
) -> None:
    """Choices are those of brute force exactly, ties aside, and after each heat is where the lookups now end."""
    world = World(page_size, window_tokens, retention, heal_tokens)
    for index, prompt in enumerate(prompts):
        pages = world.driver.prefill(prompt, chunk_tokens=chunk)
        if index >= num_open:
            pages.finish()
        world.known[tuple(prompt)] = weights[index]
    world.settle()
    for num_pages in steps:
        candidates = {node.node_id: world.loss(node) for node in world.nodes if _is_candidate(world, node)}
        for _ in range(num_pages):
            before = {node.node_id: len(node.window_pages) for node in world.nodes}
            if world.ledger.evict_window(1) == 0:
                return
            now = world.ledger.tree.nodes
            victim = next(
                node_id for node_id, had in before.items() if node_id not in now or had > len(now[node_id].window_pages)
            )
            least = min(candidates.values())
            assert candidates[victim] <= least * (1 + 1e-4), f"node {victim} of {candidates}"
            world.driver.cache.check()
            weights_now = world.ends()
            for node in world.nodes:
                assert node.heat == pytest.approx(weights_now[node.node_id])
            candidates = {node.node_id: world.loss(node) for node in world.nodes if _is_candidate(world, node)}


def _is_candidate(world: World, node: Node) -> bool:
    return bool(node.window_pages) and node.window_pages[0] not in world.ledger.refs


def test_ranks_that_grew_out_of_sight_are_looked_up_again() -> None:
    """More nodes fall back on a lost boundary than are told: they learn of their longer fall when their turn comes."""
    world = World(1, 1, RetentionPolicy(retention_stride_tokens=0, at_chunk_ends=False), 0, pools=(9000, 2000))
    shared = list(range(1000))
    world.driver.checks = False
    for session in range(60):
        # Short and asked for often, or long and rarely.
        num_own, weight = (20, 30) if session % 2 else (200, 4)
        tokens = shared + [1000 * (session + 1) + position for position in range(num_own)]
        world.driver.serve(tokens)
        world.known[tuple(tokens)] = weight
    world.settle()
    by_length = {node.num_pages: node for node in world.nodes}
    assert world.loss(by_length[20]) < world.loss(by_length[200])
    (shared_end,) = (node for node in world.nodes if node.stop == 1000)
    world.policy.ends_lost(shared_end, len(shared_end.window_pages))
    world.ledger._free_windows(shared_end.window_pages)
    shared_end.window_pages = []
    world.ledger.windows_changed(shared_end)
    assert world.ledger.num_cut_short > 0
    assert world.loss(by_length[20]) > world.loss(by_length[200])
    for _ in range(30):
        assert world.ledger.evict_window(2) == 2
        world.driver.cache.check()
    assert {node.num_pages for node in world.nodes if node.window_pages} == {20}


def test_heat_halves_and_a_key_does_not_move_by_waiting() -> None:
    policy = MarginalLoss(1, tail_pages=1, page_size=16, half_life_lookups=10)
    ledger = CacheDriver(16, 16, 40, 40).cache._ledger
    nodes = [ledger.tree.add_child(ledger.tree.root, [bytes([name])] * 4, [0] * 4, [0]) for name in (1, 2)]
    for node, clock in zip(nodes, (0, 10), strict=True):
        policy.used(node, clock)
    assert policy.window_rank(nodes[0]) < policy.window_rank(nodes[1])
    policy.touched(nodes[0], 10)
    assert nodes[0].heat == 0.5
    rank = policy.window_rank(nodes[0])
    policy.touched(nodes[1], 30)
    assert policy.window_rank(nodes[0]) == rank
    # Twice the distance makes up for one half-life.
    nodes[0].heat, nodes[0].heat_at = 1.0, 10
    nodes[1].heat, nodes[1].heat_at = 1.0, 20
    nodes[0].keys += [b"x"] * 4
    nodes[0].full_pages += [0] * 4
    assert policy.window_rank(nodes[0]) == policy.window_rank(nodes[1])


def test_the_end_of_a_branch_hands_its_heat_to_what_continues_it() -> None:
    """Two sequences go on from one end. The first takes over; the second parts from it: a use of where they do."""
    driver = CacheDriver()
    driver.serve(text(0, 40))
    tree = driver.cache._ledger.tree
    prompts = [text(0, 40) + text(session, 21) for session in (1, 2)]
    rows = [driver.cache.begin(driver.keys(prompt), 61) for prompt in prompts]
    (end,) = tree.root.children.values()
    assert (end.stop, end.heat) == (10, 1.0)
    heats = []
    for row, prompt in zip(rows, prompts, strict=True):
        driver.advance(row, driver.keys(prompt), 61)
        heats.append((end.heat, [child.heat for child in end.children.values()]))
    assert heats == [(0.0, [1.0]), (1.0, [1.0, 0.0])]
    for row in rows:
        row.finish()
    assert [child.heat for child in end.children.values()] == [1.0, 1.0]
    driver.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("heal_tokens", -1), ("half_life_lookups", 0.0), ("half_life_lookups", math.nan), ("half_life_lookups", math.inf)],
)
def test_nonsense_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; allowed: "):
        MarginalLoss(1, tail_pages=1, page_size=1, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["window_pages", "tail_pages", "page_size", "num_window_pages", "heal_tokens"])
def test_a_policy_of_nonsense_is_refused_by_name(name: str) -> None:
    numbers = {"window_pages": 8, "tail_pages": 1, "page_size": 16, "num_window_pages": 90, "heal_tokens": 0}
    for policy in get_args(WindowEviction):
        with pytest.raises(ValueError, match=f"{name} is -1; allowed: "):
            make_policy(policy, **(numbers | {name: -1}))


def test_a_policy_of_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="name is 'bogus'; allowed: marginal, tail, lru"):
        make_policy(
            "bogus",  # type: ignore[arg-type]
            window_pages=8, tail_pages=1, page_size=16, num_window_pages=90, heal_tokens=0,
        )  # fmt: skip


def test_policies_by_name() -> None:
    kinds = [
        type(make_policy(name, window_pages=8, tail_pages=1, page_size=16, num_window_pages=90, heal_tokens=0))
        for name in get_args(WindowEviction)
    ]
    assert kinds == [MarginalLoss, TailKeepingLru, PlainLru]


def test_plain_recency_takes_the_oldest_node_whole() -> None:
    driver = CacheDriver(policy="lru", retention=RetentionPolicy(dense_retention_tokens=40, at_chunk_ends=False))
    driver.serve(text(0, 40))
    driver.serve(text(1, 40))
    driver.cache._ledger.evict_window(10)
    assert [driver.hit(text(session, 41)) for session in (0, 1)] == [0, 40]
    assert driver.cache.stats().window.evictable == 10


def test_full_pages_of_who_came_back_outlive_those_of_who_never_did() -> None:
    """Two sessions as old as each other, one in its second turn: short of pages, the other one goes first."""
    driver = CacheDriver(num_full=60, num_window=200)
    for session in range(2, 12):
        driver.serve(text(session, 40))
    assert driver.cache.stats().num_evicted_full_pages > 0, "nobody knows yet how long pages live"
    driver.serve(text(0, 20))
    assert driver.serve(text(0, 40)) == 20
    driver.serve(text(1, 40))
    for session in range(20, 25):
        driver.serve(text(session, 40))
    assert driver.hit(text(1, 41)) < 40
    assert driver.hit(text(0, 41)) == 40


def test_who_came_back_goes_too_in_the_end() -> None:
    driver = CacheDriver(num_full=60, num_window=200)
    for session in range(2, 12):
        driver.serve(text(session, 40))
    driver.serve(text(0, 20))
    driver.serve(text(0, 40))
    for session in range(20, 40):
        driver.serve(text(session, 40))
    assert driver.hit(text(0, 41)) == 0
