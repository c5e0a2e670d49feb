"""Deltas in order, whatever order they come in."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.gateway.generation import InOrder
from epd.types import TokenDelta, TokenLogprob

WHOLE = tuple(range(10, 22))


def delta(start: int, stop: int) -> TokenDelta:
    logprobs = tuple(TokenLogprob(token_id=token_id, logprob=-0.1) for token_id in WHOLE[start:stop])
    return TokenDelta(request_id="r", index=start, token_ids=WHOLE[start:stop], logprobs=logprobs)


@given(st.sets(st.integers(1, len(WHOLE) - 1)), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_order_gives_the_answer_once(borders: set[int], rng: object) -> None:
    cuts = [0, *sorted(borders), len(WHOLE)]
    deltas = [delta(start, stop) for start, stop in itertools.pairwise(cuts)]
    # Some come twice.
    shuffled = deltas + deltas[:2]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    order, got = InOrder(0), []
    for entry in shuffled:
        for tokens in order.push(entry):
            assert [logprob.token_id for logprob in tokens.logprobs] == list(tokens.token_ids)
            got += tokens.token_ids
    assert tuple(got) == WHOLE
    assert order.next_index == len(WHOLE)


def test_a_gap_is_waited_for() -> None:
    order = InOrder(2)
    assert order.push(delta(4, 6)) == []
    assert order.next_index == 2
    assert [tokens.token_ids for tokens in order.push(delta(2, 4))] == [WHOLE[2:4], WHOLE[4:6]]


def test_what_is_known_already_is_dropped() -> None:
    order = InOrder(3)
    assert order.push(delta(0, 3)) == []
    assert [tokens.token_ids for tokens in order.push(delta(1, 5))] == [WHOLE[3:5]]
