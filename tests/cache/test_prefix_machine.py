"""Random schedules against the flat oracle, with a shadow of what every page was last written with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd.cache.keys import page_keys
from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.cache.victims import make_policy
from epd.cache.window import num_window_pages
from epd.config import WindowEviction
from epd.kv.dual import DualPool
from epd.kv.errors import NoPages
from tests.oracles.effort import effort
from tests.oracles.prefix_oracle import OracleRow, PrefixOracle, brute_force_hit, contents

SEED = b"model/layout"


@dataclass
class Run:
    """One running sequence: its tokens (prompt and what was generated), its row, and the oracle's row."""

    tokens: list[int]
    pages: SequencePages
    shadow: OracleRow


class PrefixMachine(RuleBasedStateMachine):
    """Tiny pools, two-letter alphabet: collisions of prefixes, of pages and of needs are the rule."""

    @initialize(
        page_size=st.integers(1, 4),
        window=st.tuples(st.integers(0, 3), st.integers(-1, 1)),
        sizes=st.tuples(st.integers(6, 40), st.integers(6, 30)),
        retention=st.builds(
            RetentionPolicy,
            dense_retention_tokens=st.sampled_from([0, 0, 5, 1000]),
            retention_stride_tokens=st.sampled_from([0, 4, 9]),
            at_chunk_ends=st.booleans(),
            tail_pages=st.integers(1, 2),
            release_interval_tokens=st.sampled_from([1, 1, 3, 8]),
            long_prompt_tokens=st.sampled_from([10, 65_536]),
            long_stride_tokens=st.sampled_from([0, 12]),
            learns_branches=st.booleans(),
            learning_threshold_tokens=st.sampled_from([1, 4]),
        ),
        policy=st.sampled_from(get_args(WindowEviction)),
        heal_tokens=st.sampled_from([0, 0, 5]),
    )
    def start(
        self,
        page_size: int,
        window: tuple[int, int],
        sizes: tuple[int, int],
        retention: RetentionPolicy,
        policy: WindowEviction,
        heal_tokens: int,
    ) -> None:
        self.page_size = page_size
        self.window_tokens = max(0, window[0] * page_size + window[1])
        self.pool = DualPool(num_full_pages=sizes[0], num_window_pages=sizes[1])
        self.cache = PrefixCache(
            self.pool,
            page_size=page_size,
            window_tokens=self.window_tokens,
            retention=retention,
            policy=make_policy(
                policy,
                window_pages=num_window_pages(self.window_tokens, page_size),
                tail_pages=retention.tail_pages,
                page_size=page_size,
                num_window_pages=sizes[1],
                heal_tokens=heal_tokens,
            ),
        )
        self.oracle = PrefixOracle(page_size=page_size, window_tokens=self.window_tokens, retention=retention)
        self.retention = retention
        self.runs: list[Run] = []
        self.texts: list[list[int]] = [[0] * 12]
        self.full_tags: dict[tuple[int, int], int] = {}
        self.window_tags: dict[tuple[int, int], int] = {}
        self.num_evicted = 0
        self.longest_chunk = 0

    def keys(self, tokens: list[int]) -> list[bytes]:
        return page_keys(tokens, [], page_size=self.page_size, seed=SEED)

    def prompt(self, data: st.DataObject) -> list[int]:
        text = data.draw(st.sampled_from(self.texts))
        kept = data.draw(st.integers(0, len(text)))
        # Runs of one symbol: long enough to move windows, few enough to meet again.
        prompt = text[:kept] + [data.draw(st.integers(0, 1))] * data.draw(st.integers(0, 6 * self.page_size))
        self.texts.append(prompt or [1])
        return prompt or [1]

    def compute(self, run: Run, start: int, stop: int, *, garbage: bool = False) -> None:
        """Write token positions [start, stop) of both pools, as a forward would."""
        for position in range(start, stop):
            index, offset = divmod(position, self.page_size)
            tag = -1 if garbage else hash(tuple(run.tokens[: position + 1]))
            self.full_tags[run.pages.full_pages[index], offset] = tag
            window = run.pages.window_page(index)
            if window is not None:
                self.window_tags[window, offset] = tag

    def extend(self, run: Run, num_tokens: int, window_start: int | None = None) -> bool:
        """Extend, checking that fits() foretold the outcome and that a refusal changed nothing."""
        needed = run.pages.pages_needed(num_tokens, window_start=window_start)
        foretold = self.cache.fits(*needed)
        before = (list(run.pages.full_pages), list(run.pages.window_pages), self.cache.stats())
        try:
            run.pages.extend(num_tokens, window_start=window_start)
        except NoPages:
            assert not foretold
            assert before == (run.pages.full_pages, run.pages.window_pages, self.cache.stats())
            return False
        assert foretold
        self.note_evictions()
        return True

    def note_evictions(self) -> None:
        stats = self.cache.stats()
        evicted = stats.num_evicted_full_pages + stats.num_evicted_window_pages
        if evicted != self.num_evicted:
            self.num_evicted = evicted
            self.oracle.forget(contents(self.cache))

    def end(self, run: Run, *, aborted: bool) -> None:
        self.runs.remove(run)
        self.texts.append(run.tokens)
        if aborted:
            run.pages.abort()
        else:
            run.pages.finish()
        run.pages.finish()
        self.oracle.finish(run.shadow, aborted=aborted)

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        prompt = self.prompt(data)
        keys = self.keys(prompt)
        hit = self.cache.match(keys, len(prompt))
        cap = data.draw(st.none() | st.integers(0, len(prompt)))
        pages = self.cache.begin(keys, len(prompt), max_cached_tokens=cap)
        if cap is None:
            assert pages.num_cached_tokens == hit.num_tokens
        assert pages.num_cached_tokens == self.oracle.hit(
            keys, min(len(prompt), len(prompt) if cap is None else cap + 1)
        )
        shadow = self.oracle.begin(keys, len(prompt), pages.num_cached_tokens)
        self.runs.append(Run(prompt, pages, shadow))

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """A decode worker is sent a prompt: full pages it lacks, and the live window whole."""
        prompt = self.prompt(data)
        keys = self.keys(prompt)
        pages = self.cache.begin(keys, len(prompt), full_only=True)
        assert pages.num_cached_tokens == self.cache.match(keys, len(prompt)).num_full_only_tokens
        shadow = self.oracle.begin(keys, len(prompt), pages.num_cached_tokens, with_window=False)
        run = Run(prompt, pages, shadow)
        self.runs.append(run)
        start = self.cache.window_frontier(len(prompt))
        if not self.extend(run, len(prompt), start):
            self.end(run, aborted=True)
            return
        self.oracle.reopen(shadow, start)
        self.compute_received(run, start)
        run.pages.commit(len(prompt), keys)
        self.oracle.commit(shadow, len(prompt), keys)

    def compute_received(self, run: Run, start: int) -> None:
        for position in range(min(start * self.page_size, run.pages.num_cached_tokens), len(run.tokens)):
            index, offset = divmod(position, self.page_size)
            tag = hash(tuple(run.tokens[: position + 1]))
            if position >= run.pages.num_cached_tokens:
                self.full_tags[run.pages.full_pages[index], offset] = tag
            window = run.pages.window_page(index)
            if window is not None:
                self.window_tags[window, offset] = tag

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), chunk=st.integers(1, 20))
    def advance(self, data: st.DataObject, chunk: int) -> None:
        """One prefill chunk, or, past the prompt, some decoded tokens."""
        run = data.draw(st.sampled_from(self.runs))
        done, prompt = run.pages.num_committed_tokens, run.shadow.num_prompt_tokens
        stop = min(done + chunk, prompt) if done < prompt else done + chunk
        run.tokens = run.tokens + [data.draw(st.integers(0, 1))] * max(0, stop - len(run.tokens))
        if not self.extend(run, stop):
            return
        self.longest_chunk = max(self.longest_chunk, stop - done)
        self.compute(run, done, stop)
        keys = self.keys(run.tokens)
        run.pages.commit(stop, keys)
        self.oracle.commit(run.shadow, stop, keys)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), drafts=st.integers(1, 5))
    def draft_rejected(self, data: st.DataObject, drafts: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        done = run.pages.num_committed_tokens
        if self.extend(run, done + drafts):
            self.longest_chunk = max(self.longest_chunk, drafts)
            self.compute(run, done, done + drafts, garbage=True)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), aborted=st.booleans())
    def leave(self, data: st.DataObject, aborted: bool) -> None:
        self.end(data.draw(st.sampled_from(self.runs)), aborted=aborted)

    @rule(full=st.integers(0, 6), window=st.integers(0, 6))
    def evict(self, full: int, window: int) -> None:
        ledger = self.cache._ledger
        for wanted, evictable, evict in (
            (full, ledger.num_evictable_full, ledger.evict_full),
            (window, None, ledger.evict_window),
        ):
            can = ledger.num_evictable_window if evictable is None else evictable
            assert evict(wanted) == min(wanted, can)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        stats = self.cache.stats()
        assert (stats.full.evictable, stats.window.evictable) == (0, 0)

    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        """match() changes nothing; fits() with a prompt foretells what is left after the lease."""
        prompt = self.prompt(data)
        keys = self.keys(prompt)
        before = (contents(self.cache), self.cache.stats())
        self.cache.match(keys, len(prompt))
        want = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
        foretold = self.cache.fits(*want, keys=keys, num_tokens=len(prompt))
        assert before == (contents(self.cache), self.cache.stats())
        pages = self.cache.begin(keys, len(prompt))
        shadow = self.oracle.begin(keys, len(prompt), pages.num_cached_tokens)
        assert foretold == self.cache.fits(*want)
        pages.abort()
        self.oracle.finish(shadow, aborted=True)
        after = self.cache.stats()
        assert (after.full, after.window) == (before[1].full, before[1].window)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats = self.cache.stats()
        for pool in (stats.full, stats.window):
            assert pool.free + pool.evictable + pool.leased == pool.total
            assert min(pool.free, pool.evictable, pool.leased) >= 0

    @invariant()
    def agrees_with_the_log(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.note_evictions()
        held = contents(self.cache)
        assert {key: pages[1] is not None for key, pages in held.items()} == self.oracle.live
        for text in self.texts[-6:]:
            keys = self.keys(text)
            hit = self.cache.match(keys, len(text))
            assert hit.num_tokens == self.oracle.hit(keys, len(text))
            no_window = dict.fromkeys(held, True)
            assert hit.num_full_only_tokens == brute_force_hit(
                no_window, keys, len(text), page_size=self.page_size, window_tokens=0
            )

    @invariant()
    def rows_read_what_was_written(self) -> None:
        for run in getattr(self, "runs", []):
            pages = run.pages
            assert (
                pages.window_start <= self.cache.window_frontier(pages.num_committed_tokens) or not self.window_tokens
            )
            first = pages.window_start * self.page_size if self.window_tokens else pages.num_committed_tokens
            assert first <= max(0, pages.num_committed_tokens - self.window_tokens) or not self.window_tokens
            for position in range(pages.num_committed_tokens):
                index, offset = divmod(position, self.page_size)
                tag = hash(tuple(run.tokens[: position + 1]))
                assert self.full_tags[pages.full_pages[index], offset] == tag
                if position >= first:
                    window = pages.window_page(index)
                    assert window is not None
                    assert self.window_tags[window, offset] == tag

    @invariant()
    def window_use_is_bounded(self) -> None:
        for run in getattr(self, "runs", []):
            policy = self.retention
            slack = self.longest_chunk + policy.release_interval_tokens + (2 + policy.tail_pages) * self.page_size
            bound = -(-(self.window_tokens + slack) // self.page_size) + 1
            if run.pages.num_committed_tokens:
                assert len(run.pages.window_pages) <= bound

    def teardown(self) -> None:
        for run in list(getattr(self, "runs", [])):
            self.end(run, aborted=False)
        if hasattr(self, "cache"):
            self.cache.check()
            self.cache.clear()
            self.cache.check()
            assert self.pool.full.num_free == self.pool.full.num_pages
            assert self.pool.window.num_free == self.pool.window.num_pages
            assert len(self.cache._ledger.tree.nodes) == 1


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = effort(40, num_steps=40)
TestPrefixMachine = pytest.mark.timeout(0)(TestPrefixMachine)
