"""The order of the line against recomputing every request's worth at every instant, over a cache that changes."""

import random

from epd.cache.tiers.tiered import TieredCache
from epd.engine.fetching import NO_STORE
from epd.engine.healing import Outlook, outlook
from epd.engine.line import WaitingLine
from epd.engine.sequence import Sequence, key_chain
from tests.engine.conftest import make_request
from tests.engine.paper import CREDIT, PEER, Paper, make_paper, paper_cost

STEMS = [[(5 * i * i + stem * 31 + i) % 120 for i in range(120)] for stem in range(3)]
PAGE_SIZE = 4
COST = paper_cost(PAGE_SIZE)


class World:
    """A line over a real cache. Others publish and evict; time passes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.paper = make_paper(page_size=PAGE_SIZE)
        self.now_s = 0.0
        self.line = WaitingLine(
            self.paper.feed, NO_STORE, self.assess, credit_tokens_per_s=CREDIT, now_s=lambda: self.now_s
        )
        self.orders: dict[str, int] = {}

    @property
    def cache(self) -> TieredCache:
        return self.paper.cache

    def assess(self, sequence: Sequence) -> Outlook:
        return outlook(self.cache, sequence, COST)

    def new(self, length: int) -> Sequence:
        tokens = [*self.rng.choice(STEMS)[:length], *((self.rng.randrange(3),) * self.rng.randrange(3))]
        sequence = Sequence(
            request=make_request(f"r{len(self.orders)}", tokens),
            peer=PEER,
            arrival_s=self.now_s - self.rng.random() / 9,
        )
        sequence.chain = key_chain(sequence.request, page_size=PAGE_SIZE, seed=b"")
        self.orders[sequence.request_id] = len(self.orders)
        return sequence

    def publish(self) -> None:
        """Another request computes its prompt, or part of it, and ends."""
        other = self.new(self.rng.randrange(8, 100))
        del self.orders[other.request_id]
        pages = self.cache.begin(other.chain.keys, other.num_tokens)
        stop = max(pages.num_cached_tokens, other.num_tokens // self.rng.choice((1, 2)))
        pages.extend(stop)
        pages.commit(stop, other.chain.keys)
        self.line.renew_like(other)
        pages.finish()

    def evict(self) -> None:
        ledger = self.cache.device._ledger
        (ledger.evict_window if self.rng.random() < 0.6 else ledger.evict_full)(self.rng.choice((2, 10, 1000)))

    def best(self) -> str | None:
        """Fewest tokens to compute less the credit for waiting, as of now; then who came first."""
        return min(
            (sequence.request_id for sequence in self.line),
            key=lambda request_id: self.worth(request_id),
            default=None,
        )

    def worth(self, request_id: str) -> tuple[float, float, int]:
        [sequence] = [waiting for waiting in self.line if waiting.request_id == request_id]
        compute = outlook(self.cache, sequence, COST).num_compute_tokens
        credit = CREDIT * (self.now_s - sequence.arrival_s)
        # Rounded: both orders are sums of the same numbers, but not in the same order.
        return round(compute - credit, 6), sequence.arrival_s, self.orders[request_id]


def test_the_first_is_the_one_worth_most_at_every_instant() -> None:
    num_changes = 0
    for seed in range(60):
        world = World(seed)
        previous = None
        for _ in range(60):
            action = world.rng.random()
            if action < 0.3 and len(world.line) < 12:
                world.line.put(world.new(world.rng.randrange(1, 110)))
            elif action < 0.45:
                world.publish()
            elif action < 0.55:
                world.evict()
            elif action < 0.7 and (first := world.line.first()) is not None:
                world.line.remove(first[0].request_id)
            else:
                world.now_s += world.rng.random() / 5
            found = world.line.first()
            first_id = None if found is None else found[0].request_id
            assert first_id == world.best(), f"seed {seed}"
            num_changes += first_id != previous and previous in {sequence.request_id for sequence in world.line}
            previous = first_id
    # Somebody else came first while the first one was still there: keys do change.
    assert num_changes > 60


def test_who_may_pass_came_before_the_first_ones_bound() -> None:
    for seed in range(20):
        world = World(seed)
        for _ in range(30):
            world.now_s += world.rng.random() / 10
            world.line.put(world.new(world.rng.randrange(1, 110)))
        found = world.line.first()
        assert found is not None
        first, ahead = found
        bound_s = first.arrival_s + ahead.num_compute_tokens / CREDIT
        ranked = sorted((sequence for sequence in world.line), key=lambda s: world.worth(s.request_id))
        expected = [s.request_id for s in ranked[1:9] if s.arrival_s <= bound_s]
        assert [sequence.request_id for sequence, _ in world.line.behind_first(8)] == expected


def run_random_load(rng: random.Random) -> tuple[Paper, list[tuple[str, int]]]:
    """A worker under a load that never lets up; who was admitted for the first time in which step."""
    paper = make_paper(
        num_full_pages=rng.choice((30, 60)), num_window_pages=60, chunk_tokens=rng.choice((8, 32)), max_running=3
    )
    admitted: list[tuple[str, int]] = []
    seen: set[str] = set()
    for step in range(160):
        while rng.random() < 0.3:
            length = rng.choice((3, 5, 10, 60, 90))
            tokens = [rng.randrange(100), *rng.choice(STEMS)[:length]]
            paper.submit(
                make_request(f"r{len(paper.requests)}", tokens, max_tokens=rng.randrange(1, 9), ignore_eos=True)
            )
        paper.step()
        paper.clock.advance(rng.random() / 10)
        # Admitted and ended between two looks does not happen: an answer of one token has its Finish.
        for request_id in [*paper.scheduler._roster.running, *paper.finishes]:
            if request_id not in seen:
                seen.add(request_id)
                admitted.append((request_id, step))
    return paper, admitted


def test_nobody_is_overtaken_by_who_comes_after_its_bound() -> None:
    """Later than arrival + tokens / credit nobody passes, whatever is short and however small it is."""
    num_overtaken = num_passed = 0
    for seed in range(30):
        paper, admitted = run_random_load(random.Random(seed))
        paper.run(pass_s=0.01)
        assert paper.finishes.keys() == paper.requests.keys()
        step_of, arrival = dict(admitted), paper.arrivals
        for request_id, request in paper.requests.items():
            bound_s = arrival[request_id] + len(request.token_ids) / CREDIT
            mine = step_of.get(request_id, 1 << 30)
            overtaking = [other for other, step in admitted if step < mine and arrival[other] > arrival[request_id]]
            num_overtaken += len(overtaking)
            assert all(arrival[other] <= bound_s + 1e-9 for other in overtaking)
        num_passed += paper.scheduler.counters.passed_over
    assert num_overtaken > 50
    assert num_passed > 20
