"""The victim queue against sorting a dictionary."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from epd.cache.lru import VictimQueue
from tests.oracles.effort import effort

OPERATIONS = st.tuples(
    st.sampled_from(["put", "discard", "first"]), st.integers(0, 8), st.integers(0, 2), st.integers(0, 9)
)


@effort(100)
@given(st.lists(OPERATIONS, max_size=200))
def test_first_is_the_smallest_live_rank(operations: list[tuple[str, int, int, int]]) -> None:
    queue, truth = VictimQueue(), {}
    for name, item, rank_class, access in operations:
        if name == "put":
            queue.put(item, (rank_class, access))
            truth[item] = (rank_class, access)
        elif name == "discard":
            queue.discard(item)
            truth.pop(item, None)
        first = queue.first()
        assert len(queue) == len(truth)
        assert (item in queue) == (item in truth)
        if not truth:
            assert first is None
        else:
            assert first is not None
            assert truth[first] == min(truth.values())
            assert queue.rank(first) == truth[first]


def test_stale_entries_do_not_pile_up() -> None:
    queue = VictimQueue()
    for access in range(10_000):
        queue.put(access % 5, (0, access))
    assert len(queue._heap) <= 2 * 5 + 65
    assert queue.first() == 9_995 % 5
