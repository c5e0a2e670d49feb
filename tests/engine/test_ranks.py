"""Tensor parallelism: ranks agree on what can run. Two in one thread for what may happen, two processes for gloo."""

import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.engine.feed import Arrivals, Deliver, EmbeddingFeed
from epd.engine.ranks import _NUM_SLOTS, RankFeed
from tests.fakes.rank_process import STEP_S, Plan, Report, ref, run_rank

PATIENCE_S = 120.0
SLOW_S = 2.0


@dataclass
class Table:
    """Where ranks in one thread meet: the tensors of each collective, by its number."""

    size: int
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)


class TableGroup:
    """A group whose collectives end when every rank has begun them."""

    def __init__(self, rank: int, table: Table) -> None:
        self._rank, self._table = rank, table
        self._num_begun = 0

    @property
    def rank(self) -> int:
        return self._rank

    def broadcast(self, tensor: Tensor) -> "TablePending":
        return self._begin(tensor, lambda all_of: all_of[0])

    def minimum(self, tensor: Tensor) -> "TablePending":
        return self._begin(tensor, lambda all_of: torch.stack(all_of).amin(0))

    def _begin(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> "TablePending":
        mine = self._table.tensors.setdefault(self._num_begun, [])
        mine.append(tensor.clone())
        pending = TablePending(self._table, self._num_begun, tensor, combine)
        self._num_begun += 1
        return pending


@dataclass
class TablePending:
    table: Table
    number: int
    tensor: Tensor
    combine: Callable[[list[Tensor]], Tensor]

    def wait(self) -> None:
        all_of = self.table.tensors[self.number]
        assert len(all_of) == self.table.size, "a rank waits for one that has not begun"
        self.tensor.copy_(self.combine(all_of))


class Hand:
    """A source that delivers when told to."""

    def __init__(self) -> None:
        self.waiting: dict[int, Deliver] = {}

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        number = ref.checksum
        self.waiting[number] = deliver
        return lambda: None

    def deliver(self, number: int, *, lost: bool = False) -> None:
        deliver = self.waiting.pop(number, None)
        if deliver is not None:
            deliver(EmbeddingLost("gone") if lost else torch.full((4, 8), float(number)))

    def close(self) -> None:
        pass


class Pair:
    """Two ranks, stepped one after the other."""

    def __init__(self) -> None:
        table = Table(2)
        self.hands = [Hand(), Hand()]
        self.feeds = [EmbeddingFeed(hand, limit_bytes=1 << 20, wake=lambda: None) for hand in self.hands]
        self.ranks = [RankFeed(feed, TableGroup(rank, table)) for rank, feed in enumerate(self.feeds)]

    def step(self) -> Arrivals:
        """What both ranks saw, which must be the same."""
        first, second = [ranks.collect() for ranks in self.ranks]
        assert first.ready == second.ready
        assert [request_id for request_id, _ in first.lost] == [request_id for request_id, _ in second.lost]
        return first

    def steps(self, number: int = 4) -> Arrivals:
        seen = [self.step() for _ in range(number)]
        ready = tuple(request_id for arrivals in seen for request_id in arrivals.ready)
        return Arrivals(ready, tuple(loss for arrivals in seen for loss in arrivals.lost))


def test_a_request_runs_when_the_last_rank_has_its_rows() -> None:
    pair = Pair()
    pair.ranks[0].want("a", [ref(1), ref(2)], 0.0)
    pair.steps()
    for hand, number in ((0, 1), (0, 2), (1, 2)):
        pair.hands[hand].deliver(number)
        assert pair.steps() == Arrivals()
        assert not pair.ranks[0].holds("a", [ref(1)])
    pair.hands[1].deliver(1)
    assert pair.steps().ready == ("a",)
    assert pair.ranks[0].holds("a", [ref(1), ref(2)])
    assert all(ranks.tensor(ref(1)).eq(1).all() for ranks in pair.ranks)
    pair.ranks[0].forget("a")
    pair.steps()
    assert [feed.held_bytes for feed in pair.feeds] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_on_any_rank_is_a_loss_on_all(rank: int) -> None:
    pair = Pair()
    pair.ranks[0].want("a", [ref(1)], 0.0)
    pair.ranks[0].want("b", [ref(2)], 0.0)
    pair.steps()
    pair.hands[1 - rank].deliver(1)
    pair.hands[rank].deliver(1, lost=True)
    for hand in pair.hands:
        hand.deliver(2)
    arrivals = pair.steps()
    assert [request_id for request_id, _ in arrivals.lost] == ["a"]
    assert arrivals.ready == ("b",)
    pair.ranks[0].forget("a")
    pair.ranks[0].want("a", [ref(1)], 0.0)
    pair.steps()
    for hand in pair.hands:
        hand.deliver(1)
    assert pair.steps().ready == ("a",), "asked again, it is fetched again"


def test_what_was_agreed_does_not_outlive_what_is_wanted() -> None:
    pair = Pair()
    pair.ranks[0].want("a", [ref(1), ref(2)], 0.0)
    pair.steps()
    for hand in pair.hands:
        hand.deliver(1)
        hand.deliver(2)
    pair.steps()
    # The first is computed and dropped; then the sequence has to begin again.
    pair.ranks[0].want("a", [ref(2)], 0.0)
    pair.ranks[0].want("a", [ref(1), ref(2)], 0.0)
    assert pair.ranks[0].holds("a", [ref(2)])
    assert not pair.ranks[0].holds("a", [ref(1)])
    assert pair.steps() == Arrivals()
    pair.hands[0].deliver(1)
    assert pair.steps() == Arrivals()
    pair.hands[1].deliver(1)
    assert pair.steps().ready == ("a",)
    assert pair.ranks[0].holds("a", [ref(1), ref(2)])


def test_more_requests_than_slots_and_long_messages() -> None:
    pair = Pair()
    num_requests = _NUM_SLOTS + 30
    for number in range(num_requests):
        pair.ranks[0].want(f"r{number}", [ref(1000 + number + other) for other in range(3)], 0.0)
    ready: list[str] = []
    for _ in range(200):
        ready += pair.step().ready
        for hand in pair.hands:
            for number in list(hand.waiting):
                hand.deliver(number)
    assert sorted(ready) == sorted(f"r{number}" for number in range(num_requests))


def test_only_rank_0_decides() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        Pair().ranks[1].want("a", [ref(1)], 0.0)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.integers(0, 3), st.lists(st.integers(1, 5), max_size=3, unique=True)),
        st.tuples(st.just("forget"), st.integers(0, 3), st.just([])),
        st.tuples(st.just("deliver"), st.integers(0, 1), st.lists(st.integers(1, 5), min_size=1, max_size=1)),
        st.tuples(st.just("lose"), st.integers(0, 1), st.lists(st.integers(1, 5), min_size=1, max_size=1)),
        st.tuples(st.just("step"), st.just(0), st.just([])),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(actions)
def test_rank_0_never_runs_what_another_rank_cannot(actions: list[tuple[str, int, list[int]]]) -> None:
    pair = Pair()
    wanted: dict[str, list[EmbeddingRef]] = {}

    def step() -> None:
        for request_id, _ in pair.step().lost:
            wanted.pop(request_id, None)
            pair.ranks[0].forget(request_id)
        for request_id, refs in wanted.items():
            if refs and pair.ranks[0].holds(request_id, refs):
                assert all(ranks.tensor(one).eq(one.checksum).all() for ranks in pair.ranks for one in refs)

    for action, number, names in actions:
        match action:
            case "want":
                wanted[f"r{number}"] = [ref(name) for name in names]
                pair.ranks[0].want(f"r{number}", wanted[f"r{number}"], 0.0)
            case "forget":
                wanted.pop(f"r{number}", None)
                pair.ranks[0].forget(f"r{number}")
            case "deliver" | "lose":
                pair.hands[number].deliver(names[0], lost=action == "lose")
            case "step":
                step()
    for _ in range(12):
        for hand in pair.hands:
            for number in list(hand.waiting):
                hand.deliver(number)
        step()
    for request_id, refs in wanted.items():
        assert pair.ranks[0].holds(request_id, refs), f"{request_id} waits for ever"
        pair.ranks[0].forget(request_id)
    step()
    step()
    assert [feed.held_bytes for feed in pair.feeds] == [0, 0]


def make_plan() -> Plan:
    chance = random.Random(7)
    media = {f"r{i}": tuple(chance.sample(range(1, 40), chance.randint(1, 4))) for i in range(60)}
    media |= {"slow": (100,), "lost-0": (101, 1), "lost-1": (102, 2), "slow-0": (103,)}
    media |= {f"aborted-{i}": (100 + 10 * i, i) for i in range(1, 4)}
    return Plan(
        media=media,
        lost={0: {101}, 1: {102}},
        slow={1: {100: SLOW_S}, 0: {103: 0.4}},
        aborted={f"aborted-{i}": 3 + 4 * i for i in range(1, 4)},
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Report]:
    """Two processes over gloo on loopback."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    processes = [context.Process(target=run_rank, args=(rank, store, make_plan(), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found: list[Report] = []
        until_s = time.monotonic() + PATIENCE_S
        while len(found) < len(processes) and time.monotonic() < until_s:
            with contextlib.suppress(Empty):
                found.append(queue.get(timeout=0.2))
            assert all(process.exitcode in (None, 0) for process in processes), "a rank has failed; its output says why"
        for process in processes:
            process.join(PATIENCE_S)
        first, second = sorted(found, key=lambda report: report.rank)
        return first, second
    finally:
        for process in processes:
            process.kill()


def test_processes_run_the_same_requests_at_the_same_steps(reports: tuple[Report, Report]) -> None:
    first, second = reports
    assert first.ran == second.ran
    assert [loss[:2] for loss in first.lost] == [loss[:2] for loss in second.lost]
    assert first.num_steps == second.num_steps
    ran, lost = [one for _, one in first.ran], {one for _, one, _ in first.lost}
    assert lost == {"lost-0", "lost-1"}
    assert len(ran) == len(set(ran))
    kept = {request_id for request_id in make_plan().media if not request_id.startswith(("lost", "aborted"))}
    assert kept <= set(ran)


def test_a_loss_in_one_process_is_told_in_both(reports: tuple[Report, Report]) -> None:
    told = [{request_id: message for _, request_id, message in report.lost} for report in reports]
    assert told[0]["lost-0"] == "lost on rank 0"
    assert "another rank" in told[1]["lost-0"]
    assert told[1]["lost-1"] == "lost on rank 1"
    assert "another rank" in told[0]["lost-1"]


def test_late_rows_on_one_rank_delay_their_request_alone(reports: tuple[Report, Report]) -> None:
    step_of = {request_id: step for step, request_id in reports[0].ran}
    late = {"slow", "last"}
    others = [step for request_id, step in step_of.items() if request_id not in late]
    assert max(others) < step_of["slow"]
    # Steps went on, and none of them waited for the rows.
    assert step_of["slow"] - max(others) > 0.1 * SLOW_S / STEP_S
    for report in reports:
        assert report.longest_collect_s < SLOW_S / 2
        assert report.held_bytes == ref(0).size_bytes


def test_a_rank_that_is_gone_is_noticed(reports: tuple[Report, Report]) -> None:
    assert reports[0].notices_the_end_of_the_other
