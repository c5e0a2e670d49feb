"""Schedules under pressure: sessions in turns, idle ones, waiting ones, and what each policy makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from epd.cache.keys import PageKeyChain
from epd.cache.retention import RetentionPolicy
from epd.cache.victims import WindowEviction
from epd.kv.errors import NoPages
from tests.fakes.cache_driver import SEED, CacheDriver, text

PAGE, WINDOW = 16, 128
KEPT_PAGES = WINDOW // PAGE + 1
ANCHORS = {
    "defaults": RetentionPolicy(),
    "dense": RetentionPolicy(dense_retention_tokens=2048),
    "short stride": RetentionPolicy(retention_stride_tokens=512),
}


@dataclass
class Session:
    """A conversation that grows by a prompt and an answer per turn. `template`: which beginning it shares."""

    driver: CacheDriver
    number: int
    num_first_tokens: int
    template: int | None = None
    num_turns: int = 0
    chain: PageKeyChain = field(init=False)

    def __post_init__(self) -> None:
        self.chain = PageKeyChain(page_size=self.driver.page_size, seed=SEED)
        if self.template is not None:
            self.chain.extend(text(self.template, 2048))
        self.chain.extend(text(self.number, self.num_first_tokens))

    def turn(self, *, num_prompt_tokens: int = 200, num_answer_tokens: int = 200) -> tuple[int, int]:
        """One request; returns the tokens of its prompt that were cached, and all of them."""
        num_tokens, driver = self.chain.num_tokens, self.driver
        pages = driver.cache.begin(self.chain.keys, num_tokens)
        driver.advance(pages, self.chain.keys, num_tokens, chunk_tokens=512)
        self.chain.extend(text(self.number + 100 * self.num_turns, num_answer_tokens))
        driver.advance(pages, self.chain.keys, self.chain.num_tokens, chunk_tokens=PAGE)
        pages.finish()
        self.chain.extend(text(self.number + 100 * self.num_turns + 50, num_prompt_tokens))
        self.num_turns += 1
        return pages.num_cached_tokens, num_tokens


def hit_rate(outcomes: list[tuple[int, int]]) -> float:
    return sum(cached for cached, _ in outcomes) / sum(prompt for _, prompt in outcomes)


def crowd(
    policy: WindowEviction, retention: RetentionPolicy, *, num_window: int, num_full: int = 60_000
) -> CacheDriver:
    return CacheDriver(PAGE, WINDOW, num_full, num_window, retention, policy=policy, checks=False)


def round_robin(policy: WindowEviction, retention: RetentionPolicy, share: float) -> float:
    """Hit rate of 10 sessions that take turns, their ends together `share` of a window pool with room to run one."""
    num_sessions = 10
    room = (WINDOW + 512) // PAGE + 2
    driver = crowd(policy, retention, num_window=int(num_sessions * KEPT_PAGES / share) + room)
    sessions = [Session(driver, number, 1500) for number in range(num_sessions)]
    outcomes = [[session.turn() for session in sessions] for _ in range(6)]
    driver.cache.check()
    return hit_rate([outcome for turn in outcomes[1:] for outcome in turn])


@pytest.mark.parametrize("anchors", list(ANCHORS))
def test_no_hit_cliff_when_sessions_take_turns(anchors: str) -> None:
    """Schedule 6: a working set of 10 to 60 % of the window pool, and up to all of it, hits as if nothing went."""
    shares = (0.1, 0.3, 0.6, 1.0)
    marginal = [round_robin("marginal", ANCHORS[anchors], share) for share in shares]
    assert min(marginal) > 0.88
    assert max(marginal) - min(marginal) < 0.02
    at_60_percent = round_robin("lru", ANCHORS[anchors], 0.6)
    assert marginal[2] >= at_60_percent + 0.5, "where recency alone has fallen off the cliff"


def idle(policy: WindowEviction, *, heal_tokens: int = 0) -> float:
    """Share that an idle session finds again after two busy ones have turned the window pool over many times."""
    driver = crowd(policy, ANCHORS["short stride"], num_window=130)
    driver.heal_tokens = heal_tokens
    waiting, busy = Session(driver, 0, 3000), [Session(driver, number, 1500) for number in (1, 2)]
    waiting.turn()
    evicted = driver.cache.stats().num_evicted_window_pages
    for _ in range(25):
        for session in busy:
            session.turn()
    assert driver.cache.stats().num_evicted_window_pages - evicted > 4 * 130
    cached, prompt = waiting.turn()
    return cached / prompt


def test_an_idle_tool_call_survives_busy_sessions() -> None:
    """Schedule 7: 50 turns of others later it finds all it had; recency alone has taken its end."""
    found: dict[WindowEviction, float] = {policy: idle(policy) for policy in ("marginal", "tail", "lru")}
    assert found["marginal"] > 0.9
    assert found["lru"] == 0
    assert found["marginal"] >= found["tail"]


def test_a_shared_beginning_outlives_the_sessions_that_used_it() -> None:
    """Many short sessions behind one system prompt, the pool holding only a few of their ends: all but the first find
    the system prompt, since the heat of every session that is gone has come down to where they part."""
    found: dict[WindowEviction, float] = {}
    for policy in ("marginal", "lru"):
        driver = crowd(policy, RetentionPolicy(), num_window=120)
        outcomes = [Session(driver, 1 + number, 600, template=0).turn() for number in range(30)]
        # The second session learns where the two part; it could not hit there itself.
        found[policy] = min(cached for cached, _ in outcomes[2:])
        driver.cache.check()
    assert found["marginal"] == 2048
    assert found["lru"] <= found["marginal"]


@pytest.mark.parametrize("policy", ["marginal", "tail", "lru"])
def test_a_lookup_that_waits_promises_nothing(policy: WindowEviction) -> None:
    """Schedule 9: found, then a long wait while others take everything, then leased: what is left, and soundly."""
    driver = CacheDriver(num_full=60, num_window=30, policy=policy)
    driver.serve(text(0, 81))
    keys = driver.keys(text(0, 81))
    promised = driver.cache.match(keys, 81).num_tokens
    assert promised == 80
    driver.serve(text(1, 220), chunk_tokens=40)
    pages = driver.cache.begin(keys, 81, max_cached_tokens=promised)
    assert pages.num_cached_tokens == driver.cache.match(keys, 81).num_tokens < promised
    driver.advance(pages, keys, 81)
    # And the other way round: once leased, nothing takes it, however much is asked for.
    held = list(pages.full_pages)
    greedy = driver.cache.begin(driver.keys(text(2, 400)), 400)
    with pytest.raises(NoPages):
        greedy.extend(400)
    greedy.extend(90)
    assert pages.full_pages == held
    driver.check()
    greedy.abort()
    pages.finish()
    assert driver.hit(text(0, 82)) == 80


@pytest.mark.parametrize("policy", ["marginal", "tail", "lru"])
def test_the_pool_that_is_short_is_asked(policy: WindowEviction) -> None:
    """Schedule 8: windows short with most full pages free, and the reverse, and both."""
    driver = CacheDriver(num_full=400, num_window=14, policy=policy)
    for session in range(6):
        driver.serve(text(session, 41), chunk_tokens=8)
    stats = driver.cache.stats()
    assert (stats.num_evicted_full_pages, stats.full.evictable) == (0, 60)
    assert stats.num_evicted_window_pages > 0
    driver = CacheDriver(num_full=30, num_window=400, policy=policy)
    for session in range(6):
        driver.serve(text(session, 41), chunk_tokens=8)
    stats = driver.cache.stats()
    assert stats.num_evicted_window_pages == 0
    assert stats.num_evicted_full_pages > 0
    assert driver.hit(text(5, 42)) == 40


def test_full_pages_nobody_can_reach_go_first() -> None:
    """When the last window of a branch goes, its full pages are next, unless healing can use them."""
    for heal_tokens, survives in ((0, False), (20, True)):
        driver = CacheDriver(num_full=60, heal_tokens=heal_tokens)
        driver.serve(text(0, 81))
        driver.cache._ledger.evict_window(100)
        driver.serve(text(1, 81))
        driver.cache.begin(driver.keys(text(0, 81)), 81, full_only=True).abort()
        driver.serve(text(2, 100))
        assert driver.cache.match(driver.keys(text(0, 82)), 82).num_full_only_tokens == (80 if survives else 60)
        assert driver.hit(text(1, 82)) == (0 if survives else 80)


@pytest.mark.parametrize(
    "make_keys",
    [
        pytest.param(lambda page: [b"first", b"left%d" % page], id="same first page"),
        pytest.param(lambda page: [b"first%d" % page, b"same"], id="same second page"),
    ],
)
def test_pages_that_collide_in_one_place(make_keys: Callable[[int], list[bytes]]) -> None:
    """Schedule 25: children are found by their first page's key, and only under the right parent."""
    driver = CacheDriver()
    one, two = make_keys(1), make_keys(2)
    for keys in (one, two):
        pages = driver.cache.begin(keys, 9)
        driver.advance(pages, keys, 9)
        pages.finish()
    shared = sum(a == b for a, b in zip(one[:1], two[:1], strict=True))
    assert driver.cache.stats().full.evictable == 4 - shared
    for keys in (one, two):
        assert driver.cache.match(keys, 9).num_tokens == 8
    assert driver.cache.match([one[0], b"neither"], 9).num_full_only_tokens == 4
    assert driver.cache.match([b"neither", one[1]], 9).num_full_only_tokens == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
def test_short_prompts_take_and_leave_what_they_should(num_tokens: int) -> None:
    """Schedule 25: 0, 1, P - 1, P and P + 1 tokens."""
    driver = CacheDriver()
    for expected in (0, max(0, num_tokens - 1) // 4 * 4):
        assert driver.serve(text(0, num_tokens)) == expected
    stats = driver.cache.stats()
    assert (stats.full.evictable, stats.full.leased) == (num_tokens // 4, 0)
