"""The feed by itself: who gets room when, what is held, what is told, and that nothing stays behind."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.engine.feed import Deliver, EmbeddingFeed

ROW_BYTES = 4 * 4


def ref(name: int, num_rows: int = 10, *, lease: str = "lease") -> EmbeddingRef:
    return EmbeddingRef(
        key=f"{name:032x}",  # type: ignore[arg-type]
        arena="arena",
        offset_bytes=name * 1000,
        num_rows=num_rows,
        width=4,
        dtype="float32",
        checksum=name,
        lease_id=lease,
    )


class Hand:
    """A source that delivers when it is told to, also what was cancelled."""

    def __init__(self) -> None:
        self.begun: list[EmbeddingRef] = []
        self.cancelled: list[EmbeddingRef] = []
        self.waiting: list[tuple[EmbeddingRef, Deliver]] = []
        self.is_closed = False

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        self.begun.append(ref)
        self.waiting.append((ref, deliver))
        return lambda: self.cancelled.append(ref)

    def deliver(self, index: int = 0, *, lost: bool = False) -> None:
        ref, deliver = self.waiting.pop(index)
        deliver(EmbeddingLost("gone") if lost else torch.full((ref.num_rows, ref.width), float(ref.checksum)))

    def close(self) -> None:
        self.is_closed = True


class Bell:
    def __init__(self) -> None:
        self.num_rung = 0

    def __call__(self) -> None:
        self.num_rung += 1


def make(limit_rows: int = 100) -> tuple[EmbeddingFeed, Hand, Bell]:
    hand, bell = Hand(), Bell()
    return EmbeddingFeed(hand, limit_bytes=limit_rows * ROW_BYTES, wake=bell), hand, bell


def test_a_request_is_ready_with_its_last_embedding_and_the_loop_is_woken() -> None:
    feed, hand, bell = make()
    feed.want("a", [ref(1), ref(2)], 0.0)
    assert [begun.checksum for begun in hand.begun] == [1, 2]
    hand.deliver()
    assert feed.collect().ready == ()
    assert not feed.holds("a", [ref(1), ref(2)])
    assert feed.holds("a", [ref(1)])
    hand.deliver()
    assert bell.num_rung == 2
    assert feed.collect().ready == ("a",)
    assert feed.holds("a", [ref(2), ref(1)])
    assert feed.tensor(ref(2)).eq(2).all()
    assert feed.collect().ready == (), "told once"


def test_one_embedding_is_fetched_once_for_all_who_want_it() -> None:
    feed, hand, _ = make()
    feed.want("a", [ref(1, lease="first")], 0.0)
    feed.want("b", [ref(1, lease="second")], 0.0)
    assert len(hand.begun) == 1
    hand.deliver()
    assert feed.collect().ready == ("a", "b")
    feed.want("c", [ref(1, lease="third")], 0.0)
    assert feed.holds("c", [ref(1)])
    feed.forget("a")
    feed.forget("b")
    assert feed.tensor(ref(1)).eq(1).all()
    feed.forget("c")
    assert feed.held_bytes == 0
    feed.want("d", [ref(1)], 0.0)
    assert len(hand.begun) == 2, "what nobody wanted was dropped"


def test_room_is_given_in_order_and_by_need() -> None:
    feed, hand, _ = make(limit_rows=25)
    feed.want("a", [ref(1), ref(2)], 0.0)
    feed.want("b", [ref(3)], 0.0)
    feed.want("c", [ref(4, 5)], 0.0)
    assert [begun.checksum for begun in hand.begun] == [1, 2], "the third waits, and nobody passes it"
    assert feed.held_bytes == 20 * ROW_BYTES
    hand.deliver()
    hand.deliver()
    assert feed.collect().ready == ("a",)
    feed.want("a", [ref(2)], 0.0)  # the first is computed
    assert [begun.checksum for begun in hand.begun] == [1, 2, 3, 4]
    feed.check()


def test_what_is_larger_than_all_room_goes_when_nothing_else_is_held() -> None:
    feed, hand, _ = make(limit_rows=25)
    feed.want("a", [ref(1)], 0.0)
    feed.want("b", [ref(2, 20), ref(3, 20)], 0.0)
    feed.want("c", [ref(4, 1)], 0.0)
    assert [begun.checksum for begun in hand.begun] == [1]
    feed.forget("a")
    assert [begun.checksum for begun in hand.begun] == [1, 2, 3]
    feed.forget("b")
    assert [begun.checksum for begun in hand.begun] == [1, 2, 3, 4]
    assert feed.held_bytes == ROW_BYTES


def test_a_loss_is_told_to_everyone_once_and_gives_its_room_back() -> None:
    feed, hand, _ = make(limit_rows=15)
    feed.want("a", [ref(1)], 0.0)
    feed.want("b", [ref(1)], 0.0)
    feed.want("c", [ref(2)], 0.0)
    hand.deliver(lost=True)
    arrivals = feed.collect()
    assert [request_id for request_id, _ in arrivals.lost] == ["a", "b"]
    assert feed.collect().lost == ()
    assert [begun.checksum for begun in hand.begun] == [1, 2], "its room went to the next"
    feed.forget("a")
    feed.want("a", [ref(1, 1)], 0.0)
    assert [begun.checksum for begun in hand.begun] == [1, 2, 1], "who asks again has it fetched again"
    feed.check()


def test_what_ends_is_cancelled_and_late_rows_meet_nobody() -> None:
    feed, hand, _ = make()
    feed.want("a", [ref(1)], 0.0)
    feed.forget("a")
    assert hand.cancelled == hand.begun
    assert feed.held_bytes == 0
    feed.want("b", [ref(1)], 0.0)
    hand.deliver()
    assert feed.collect().ready == (), "the rows of the first question are not the answer to the second"
    hand.deliver()
    assert feed.collect().ready == ("b",)


def test_closing_ends_everything() -> None:
    feed, hand, _ = make(limit_rows=10)
    feed.want("a", [ref(1), ref(2)], 0.0)
    feed.close()
    assert hand.is_closed
    assert (feed.held_bytes, feed.num_requests) == (0, 0)
    assert hand.cancelled == hand.begun == [ref(1), ref(2)]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.integers(0, 5), st.lists(st.integers(1, 6), max_size=3, unique=True)),
        st.tuples(st.just("forget"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("deliver"), st.integers(0, 20), st.just([])),
        st.tuples(st.just("lose"), st.integers(0, 20), st.just([])),
        st.tuples(st.just("collect"), st.just(0), st.just([])),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(actions)
def test_books_balance_room_is_kept_and_everyone_is_served(actions: list[tuple[str, int, list[int]]]) -> None:
    feed, hand, _ = make(limit_rows=25)
    wanted: dict[str, list[EmbeddingRef]] = {}
    lost: set[str] = set()

    def collect() -> None:
        for request_id, _ in feed.collect().lost:
            lost.add(request_id)
        for request_id in list(lost):
            feed.forget(request_id)
            wanted.pop(request_id, None)
        lost.clear()

    for action, number, names in actions:
        match action:
            case "want":
                wanted[f"r{number}"] = [ref(name, 4 * name) for name in names]
                feed.want(f"r{number}", wanted[f"r{number}"], 0.0)
            case "forget":
                wanted.pop(f"r{number}", None)
                feed.forget(f"r{number}")
            case "deliver" | "lose" if hand.waiting:
                hand.deliver(number % len(hand.waiting), lost=action == "lose")
            case "collect":
                collect()
        feed.check()
        largest = max((sum(one.size_bytes for one in refs) for refs in wanted.values()), default=0)
        assert feed.held_bytes <= max(25 * ROW_BYTES, largest)
    # Whoever has everything runs and lets go: then everyone is served, whatever came before.
    collect()
    while wanted:
        while hand.waiting:
            hand.deliver()
        collect()
        whole = [request_id for request_id, refs in wanted.items() if feed.holds(request_id, refs)]
        assert whole, f"nobody can run, {sorted(wanted)} wait for ever"
        for request_id in whole:
            assert all(feed.tensor(one).eq(one.checksum).all() for one in wanted.pop(request_id))
            feed.forget(request_id)
    assert (feed.held_bytes, feed.num_requests) == (0, 0)
    feed.check()
