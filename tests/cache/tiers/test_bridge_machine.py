"""Any order of prefetches, aborts, evictions, deadlines and write-backs, over a store that is late, forgetful, wrong.

After every step books balance and every ready page holds the bytes of its key (BridgeWorld.check); no page is published
before its predecessor, read though it is there, or read twice at a time (asserted where it would happen). No request
waits beyond its time, and in the end, once the store has come to rest, nobody holds anything.
"""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from epd.cache.tiers.bridge import BridgeSettings
from epd.cache.tiers.ports import KINDS, store_key
from tests.fakes.bridge_world import PAGE_SIZE, BridgeWorld, chain

NUM_PAGES = 9
PROMPTS = [
    chain("trunk", NUM_PAGES),
    chain("branch", NUM_PAGES, shared=("trunk", 5)),
    chain("twig", NUM_PAGES, shared=("trunk", 8)),
    chain("alone", NUM_PAGES),
]
TIMEOUT_S, PAGE_TIMEOUT_S, LEASE_S = 1.0, 0.1, 4.0

prompts = st.integers(0, len(PROMPTS) - 1)
pages = st.integers(0, NUM_PAGES)
kinds = st.sampled_from(KINDS)


class Bridge(RuleBasedStateMachine):
    @initialize(
        num_full=st.integers(2, 20),
        num_window=st.integers(2, 20),
        window_pages=st.integers(0, 3),
        heal_pages=st.sampled_from([None, 0, 2]),
        batch=st.integers(1, 5),
    )
    def begin(self, num_full: int, num_window: int, window_pages: int, heal_pages: int | None, batch: int) -> None:
        self.world = BridgeWorld(
            num_full_pages=num_full,
            num_window_pages=num_window,
            window_pages=window_pages,
            settings=BridgeSettings(
                prefetch_timeout_s=TIMEOUT_S,
                prefetch_page_timeout_s=PAGE_TIMEOUT_S,
                lease_s=LEASE_S,
                ttl_s=20.0,
                heal_pages=heal_pages,
                read_pages=batch,
                write_pages=batch,
                ask_keys=batch,
                touch_keys=batch,
                max_queued_pages=12,
            ),
        )
        self.latest_s: dict[str, float] = {}
        self.num_requests = 0

    @rule(prompt=prompts, full=pages, windows=st.sets(st.integers(0, NUM_PAGES - 1)))
    def another_process_puts(self, prompt: int, full: int, windows: set[int]) -> None:
        self.world.store_has(PROMPTS[prompt], full=full, windows=sorted(windows))

    @rule(prompt=prompts)
    def another_process_puts_all(self, prompt: int) -> None:
        self.world.store_has(PROMPTS[prompt])

    @rule(prompt=prompts, start=pages, num=pages)
    def computes(self, prompt: int, start: int, num: int) -> None:
        self.world.computes(PROMPTS[prompt], start, start + num)

    @rule(
        prompt=prompts,
        num_tokens=st.integers(0, NUM_PAGES * PAGE_SIZE + 1),
        device=pages,
        windows=st.sets(st.integers(0, NUM_PAGES - 1)),
        wait_s=st.sampled_from([0.0, 0.5, 100.0]),
    )
    def prefetches(self, prompt: int, num_tokens: int, device: int, windows: set[int], wait_s: float) -> None:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        world = self.world
        begun = world.prefetch(
            request_id,
            PROMPTS[prompt],
            num_tokens=num_tokens,
            device_full=device,
            device_windows=[page for page in sorted(windows) if page < device],
            deadline_s=world.now_s + wait_s,
        )
        if begun:
            num_pages = NUM_PAGES + self.world.window_pages
            self.latest_s[request_id] = world.now_s + min(wait_s, TIMEOUT_S + num_pages * PAGE_TIMEOUT_S)

    @rule(prompt=prompts)
    def prefetches_a_whole_prompt(self, prompt: int) -> None:
        self.prefetches(prompt, NUM_PAGES * PAGE_SIZE + 1, 0, set(), 100.0)

    @rule(which=st.integers(0, 3), num_keys=st.integers(1, 4), index=st.integers(0, 3))
    def store_does_a_little(self, which: int, num_keys: int, index: int) -> None:
        if self.world.store.waiting:
            call = self.world.store.waiting[which % len(self.world.store.waiting)]
            self.world.store.run(call, num_keys, index=index)

    @rule(which=st.integers(0, 3))
    def store_does_a_call(self, which: int) -> None:
        if self.world.store.waiting:
            self.world.store.run(self.world.store.waiting[which % len(self.world.store.waiting)])

    @rule()
    def all_is_done(self) -> None:
        for _ in range(3):
            self.world.store.run_all()
            self.polls()

    @rule(which=st.integers(0, 3))
    def store_gives_up(self, which: int) -> None:
        if self.world.store.waiting:
            self.world.store.finish(self.world.store.waiting[which % len(self.world.store.waiting)])

    @rule()
    def store_scribbles(self) -> None:
        self.world.store.scribble()

    @rule(prompt=prompts, page=st.integers(0, NUM_PAGES - 1), kind=kinds, lies=st.booleans())
    def store_forgets(self, prompt: int, page: int, kind: str, lies: bool) -> None:
        name = store_key("full" if kind == "full" else "window", PROMPTS[prompt][page])
        self.world.store.values.pop(name, None)
        if lies:
            self.world.store.phantoms.add(name)

    @rule(prompt=prompts, page=st.integers(0, NUM_PAGES - 1), kind=kinds)
    def a_record_rots(self, prompt: int, page: int, kind: str) -> None:
        name = store_key("full" if kind == "full" else "window", PROMPTS[prompt][page])
        self.world.store.corrupt ^= {name}

    @rule()
    def store_fills_up(self) -> None:
        self.world.store.is_full = not self.world.store.is_full

    @rule(seconds=st.sampled_from([0.05, 0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.store.expire()

    @rule()
    def polls(self) -> None:
        world = self.world
        world.bridge.poll()
        for request_id, latest_s in self.latest_s.items():
            assert world.now_s < latest_s or not world.bridge.is_fetching(request_id), "it waits too long"
        deadline_s = world.bridge.next_deadline_s()
        assert deadline_s is None or deadline_s > world.now_s

    @rule()
    def collects(self) -> None:
        for request_id in self.world.bridge.collect():
            assert not self.world.bridge.is_fetching(request_id)
            assert request_id in self.latest_s

    @rule(which=st.integers(0, 5))
    def forgets(self, which: int) -> None:
        if self.latest_s:
            request_id = list(self.latest_s)[which % len(self.latest_s)]
            self.world.bridge.forget(request_id)
            del self.latest_s[request_id]

    @rule(num=st.integers(1, 6), kind=kinds)
    def pressure(self, num: int, kind: str) -> None:
        pool = self.world.pools["full" if kind == "full" else "window"]
        names = [b"pressure %d" % number for number in range(num)]
        if pool.reserve(names) is not None:
            pool.discard(names)

    @rule(prompt=prompts)
    def condemns(self, prompt: int) -> None:
        for pool in self.world.pools.values():
            pool.condemn(PROMPTS[prompt][0])
        self.world.bridge.condemn(PROMPTS[prompt])

    @rule(prompt=prompts, num=pages)
    def is_hot(self, prompt: int, num: int) -> None:
        self.world.bridge.touch_hot(PROMPTS[prompt][:num], "g")

    @invariant()
    def books(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for request_id in self.latest_s:
            world.bridge.forget(request_id)
        world.store.scribble()
        for _ in range(200):
            while world.store.waiting:
                world.store.run(world.store.waiting[0])
            world.bridge.poll()
            world.check()
        world.check_quiet()
        asked = world.store.counters
        moved = asked["get_keys"] + asked["put_keys"] + asked["exists_keys"]
        num_intervals = 1 + math.ceil(world.now_s / (20.0 / 3))
        assert asked["touched_keys"] <= moved / 100 + num_intervals * 5


TestBridge = Bridge.TestCase
TestBridge.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
