"""Marginal loss against brute force: every prompt ever asked is looked up again with and without each candidate."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd.cache.boundaries import end_is_usable
from epd.cache.prefix import PrefixCache
from epd.cache.radix import Node
from epd.cache.retention import RetentionPolicy
from epd.cache.victims import MarginalLoss
from epd.cache.window import num_window_pages
from tests.fakes.cache_driver import CacheDriver
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

    def __post_init__(self) -> None:
        self.policy = MarginalLoss(
            num_window_pages(self.window_tokens, self.page_size),
            tail_pages=self.retention.tail_pages,
            page_size=self.page_size,
            heal_tokens=self.heal_tokens,
            half_life_lookups=1e12,
        )
        self.driver = CacheDriver(self.page_size, self.window_tokens, 400, 400, self.retention)
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
