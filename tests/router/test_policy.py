"""Choosing a worker: least loaded, prefix-affine within bounds, the same for the same input."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.router.policy import AFFINITY_SLACK, AFFINITY_TOKENS, WorkerLoad, choose_worker, prefix_affinity
from epd.types import GenerateRequest, MediaSpan, SamplingParams
from preprocess.types import MediaKey


def load(worker: str, num_assigned: int = 0, num_reported: int = 0, full: int = 10, window: int = 10) -> WorkerLoad:
    return WorkerLoad(
        worker=worker,
        num_assigned=num_assigned,
        num_reported=num_reported,
        full_pages_free=full,
        window_pages_free=window,
    )


LOADS = st.lists(
    st.builds(load, st.sampled_from("abcdef"), st.integers(0, 30), st.integers(0, 30), st.integers(0, 9)),
    max_size=6,
    unique_by=lambda entry: entry.worker,
)


def request(token_ids: tuple[int, ...], spans: tuple[MediaSpan, ...] = ()) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1)
    return GenerateRequest(
        request_id="r", token_ids=token_ids, spans=spans, sampling=sampling, arrival_unix_s=0, deadline_unix_s=1
    )


def span(key: str, start: int = 2, row_start: int = 0) -> MediaSpan:
    return MediaSpan(start=start, stop=start + 2, key=MediaKey(key), row_start=row_start, media=0)


@given(LOADS, st.one_of(st.none(), st.integers(0, 2**64 - 1)), st.randoms())
@settings(max_examples=200, deadline=None)
def test_the_order_of_the_workers_does_not_matter(
    loads: list[WorkerLoad], affinity: int | None, rng: random.Random
) -> None:
    chosen = choose_worker(loads, affinity=affinity)
    shuffled = rng.sample(loads, len(loads))
    assert choose_worker(shuffled, affinity=affinity) == chosen
    assert (chosen is None) == (not loads)


@given(LOADS, st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_affinity_never_costs_more_than_its_slack(loads: list[WorkerLoad], affinity: int) -> None:
    chosen = choose_worker(loads, affinity=affinity)
    if chosen is not None:
        by_name = {entry.worker: entry.num_requests for entry in loads}
        assert by_name[chosen] <= min(by_name.values()) + AFFINITY_SLACK


def test_ties_go_to_the_roomier_then_the_first() -> None:
    assert choose_worker([load("b"), load("a")]) == "a"
    assert choose_worker([load("a", window=3), load("b", full=9)]) == "b"
    assert choose_worker([load("a", num_reported=2), load("b", num_assigned=1)]) == "b"


def test_avoid_is_a_wish() -> None:
    assert choose_worker([load("a"), load("b", 9)], avoid={"a"}) == "b"
    assert choose_worker([load("a")], avoid={"a"}) == "a"


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    names = "abcd"
    before = {i: choose_worker([load(name) for name in names], affinity=i * 7919) for i in range(400)}
    after = {i: choose_worker([load(name) for name in "abc"], affinity=i * 7919) for i in range(400)}
    assert all(after[i] == before[i] for i in before if before[i] != "d")
    shares = [sum(chosen == name for chosen in before.values()) for name in names]
    assert min(shares) > 50


def test_affinity_is_the_beginning_of_the_prompt_and_its_media() -> None:
    head = tuple(range(AFFINITY_TOKENS))
    assert prefix_affinity(request((*head, 1))) == prefix_affinity(request((*head, 2)))
    assert prefix_affinity(request((9, *head))) != prefix_affinity(request(head))
    assert prefix_affinity(request(head, (span("a"),))) != prefix_affinity(request(head, (span("b"),)))
    beyond = AFFINITY_TOKENS + 5
    far = (*head, *range(10))
    assert prefix_affinity(request(far, (span("a", beyond),))) == prefix_affinity(request(far, (span("b", beyond),)))
