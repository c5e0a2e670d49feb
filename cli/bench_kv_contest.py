"""Replays of one workload under different caches with the same bytes: ours, ours without one of its parts, one pool.

Everything here is counted, nothing timed: the same files give the same numbers on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from cli.bench_case import BenchFailed
from cli.bench_kv_config import CacheSettings, WorkloadFile
from cli.bench_kv_sim import Replay, Tally
from cli.bench_kv_trace import Request, Trace, written
from cli.load import CONFIGS
from epd import (
    DualPool,
    HealCost,
    KvLayout,
    PoolPlan,
    PoolTooSmall,
    PrefixCache,
    RetentionPolicy,
    TextConfig,
    heal_cost,
    make_policy,
    plan_host,
    plan_pools,
)

__all__ = ["CONTENDERS", "Arena", "Contender", "Geometry"]

_DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to manage KV memory. `single_pool`: window layers keep every token, like full ones."""

    words: str
    eviction: Literal["marginal", "tail", "lru"] = "marginal"
    heals: bool = True
    dense: bool = True
    single_pool: bool = False
    is_infinite: bool = False


CONTENDERS: Mapping[str, Contender] = {
    "ours": Contender("windows go by marginal loss, dense retention, branch learning, healing"),
    "no healing": Contender("ours without healing: windows must be there", heals=False),
    "plain LRU": Contender("windows go by last use", eviction="lru"),
    "plain LRU, no healing": Contender("windows go by last use, none is healed", eviction="lru", heals=False),
    "no dense retention": Contender("windows stay at the ends of prompts and answers only", dense=False),
    "no dense, no healing": Contender("windows stay at ends only, none is healed", dense=False, heals=False),
    "single pool": Contender("window layers keep every token", single_pool=True, heals=False),
    "infinite": Contender("nothing is ever lost", single_pool=True, is_infinite=True, heals=False),
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the replay needs of a model."""

    model: str
    layout: KvLayout
    heal_tokens: int
    """The most that healing runs again."""
    heal_cost: HealCost

    @classmethod
    def of(cls, model: str, page_size: int) -> Geometry:
        """A published model of configs/models, its trunk with 16-bit keys and values."""
        raw = json.loads((CONFIGS / "models" / model / "config.json").read_text())
        config = TextConfig.from_hf(raw.get("text_config", raw))
        specs = [layer.attention for layer in config.layers]
        layout = KvLayout.from_specs(
            [spec for spec in specs if not spec.is_window],
            [spec for spec in specs if spec.is_window],
            page_size=page_size,
            dtype_bytes=_DTYPE_BYTES,
        )
        heal_tokens = sum(layer.window_left or 0 for layer in config.layers)
        return cls(model, layout, heal_tokens, heal_cost(config, page_size=page_size))

    @property
    def single_bytes_per_token(self) -> int:
        """Where window layers keep every token too."""
        return self.layout.full_bytes_per_token + self.layout.window_bytes_per_token


@dataclass
class Arena:
    """A workload, written out once, and the replays made of it so far."""

    file: WorkloadFile
    trace: Trace
    geometry: Geometry
    _tallies: dict[tuple[str, int], Tally] = field(default_factory=dict)

    @cached_property
    def sessions(self) -> list[tuple[float, list[Request]]]:
        page_size = self.file.cache.page_size
        return [(session.start_s, written(session, page_size=page_size)) for session in self.trace.sessions]

    @cached_property
    def num_requests(self) -> int:
        return sum(len(requests) for _, requests in self.sessions)

    @cached_property
    def working_set_tokens(self) -> int:
        """Most tokens that contexts of live sessions hold at a time, what they share counted once.

        A session's context is alive from its first request to its last, at its longest, with no time for serving.
        """
        page_size = self.file.cache.page_size
        begins: dict[bytes, float] = {}
        ends: dict[bytes, float] = {}
        for start_s, requests in self.sessions:
            stop_s = start_s + sum(request.pause_s for request in requests)
            longest = max(requests, key=lambda request: len(request.keys))
            for key in longest.keys:
                begins[key] = min(begins.get(key, start_s), start_s)
                ends[key] = max(ends.get(key, stop_s), stop_s)
        changes = sorted([(time_s, 1) for time_s in begins.values()] + [(time_s, -1) for time_s in ends.values()])
        return page_size * max(accumulate(change for _, change in changes))

    def budget_bytes(self, share: float) -> int:
        return int(share * self.working_set_tokens * self.geometry.single_bytes_per_token)

    @cached_property
    def dual_working_set_bytes(self) -> int:
        """What our pools would hold of the working set: full pages of every token, and a window every stride."""
        layout, num_tokens = self.geometry.layout, self.working_set_tokens
        window_pages = -(-layout.window_tokens // self.file.cache.page_size)
        num_windows = num_tokens // max(1, self.file.cache.retention_stride_tokens)
        return num_tokens * layout.full_bytes_per_token + num_windows * window_pages * layout.window_page_bytes

    def num_pages(self, name: str, share: float) -> tuple[int, int]:
        """Full and window pages that `share` buys a contender that is not infinite. Raises BenchFailed."""
        contender = CONTENDERS[name]
        retention = _retention(self.file.cache, dense=contender.dense)
        return self._num_pages(contender, self.budget_bytes(share), retention)

    def tally(self, name: str, share: float, advance: Callable[[int], None] = lambda _: None) -> Tally:
        """Of one contender with `share` of the bytes; replays it unless that was done before. Raises BenchFailed."""
        contender = CONTENDERS[name]
        key = (name, 0 if contender.is_infinite else self.budget_bytes(share))
        if key not in self._tallies:
            healing = self.geometry.heal_cost if contender.heals else None
            replay = Replay(self.cache(contender, share), self.file.server, heal_cost=healing)
            self._tallies[key] = replay.run(self.sessions, advance)
        return self._tallies[key]

    def cache(self, contender: Contender, share: float) -> PrefixCache:
        """Empty, of the size that `share` buys."""
        retention = _retention(self.file.cache, dense=contender.dense)
        num_full, num_window = self._num_pages(contender, self.budget_bytes(share), retention)
        return self.sized_cache(contender, num_full, num_window)

    def sized_cache(self, contender: Contender, num_full: int, num_window: int) -> PrefixCache:
        """Empty, of so many pages."""
        settings, layout = self.file.cache, self.geometry.layout
        retention = _retention(settings, dense=contender.dense)
        window_tokens = 0 if contender.single_pool else layout.window_tokens
        policy = make_policy(
            contender.eviction,
            window_pages=-(-window_tokens // settings.page_size),
            tail_pages=retention.tail_pages,
            page_size=settings.page_size,
            num_window_pages=num_window,
            heal_tokens=self.geometry.heal_tokens if contender.heals else 0,
        )
        return PrefixCache(
            DualPool(num_full_pages=num_full, num_window_pages=num_window),
            page_size=settings.page_size,
            window_tokens=window_tokens,
            retention=retention,
            policy=policy,
        )

    def _num_pages(self, contender: Contender, budget_bytes: int, retention: RetentionPolicy) -> tuple[int, int]:
        layout = self.geometry.layout
        if contender.is_infinite:
            return sum(len(request.keys) + 1 for _, requests in self.sessions for request in requests), 0
        if contender.single_pool:
            return budget_bytes // (layout.full_page_bytes + layout.window_page_bytes), 0
        plan = self.plan(budget_bytes, retention)
        return plan.num_full_pages, plan.num_window_pages

    def plan(self, budget_bytes: int, retention: RetentionPolicy | None = None) -> PoolPlan:
        """How a worker with so many bytes would split them over its pools. Raises BenchFailed for too few."""
        kept = _retention(self.file.cache, dense=True) if retention is None else retention
        try:
            return plan_pools(
                self.geometry.layout,
                budget_bytes,
                expected_sequence_tokens=self._mean_prompt_tokens,
                max_running=self.file.server.max_running,
                chunk_tokens=self.file.server.chunk_tokens,
                retention_stride_tokens=kept.retention_stride_tokens,
                tail_pages=kept.tail_pages,
            )
        except PoolTooSmall as error:
            share = budget_bytes / self.budget_bytes(1.0)
            raise BenchFailed(
                f"{share:.3g} of the working set of {self.trace.name}.toml is too little: {error}; a larger share in "
                "budget, smaller max_running or chunk_tokens, or more sessions would do"
            ) from error

    def plan_host(self, budget_bytes: int) -> PoolPlan:
        """The same of host memory. Raises BenchFailed."""
        kept = _retention(self.file.cache, dense=True)
        try:
            return plan_host(
                self.geometry.layout,
                budget_bytes,
                expected_sequence_tokens=self._mean_prompt_tokens,
                retention_stride_tokens=kept.retention_stride_tokens,
                tail_pages=kept.tail_pages,
            )
        except PoolTooSmall as error:
            raise BenchFailed(str(error)) from error

    @cached_property
    def _mean_prompt_tokens(self) -> int:
        lengths = [request.num_prompt_tokens for _, requests in self.sessions for request in requests]
        return sum(lengths) // len(lengths)


def _retention(settings: CacheSettings, *, dense: bool) -> RetentionPolicy:
    values = asdict(settings)
    del values["page_size"]
    kept = RetentionPolicy(**values)
    if dense:
        return kept
    return replace(kept, dense_retention_tokens=0, retention_stride_tokens=0, long_stride_tokens=0, at_chunk_ends=False)
