"""Random loads on a scheduler with a model on paper: who runs in a step, and that short memory shows in no answer."""

import random

import pytest

from epd.types import FinishReason
from tests.engine.conftest import make_request
from tests.engine.paper import Paper, make_paper, num_new
from tests.oracles.effort import scaled

STEMS = [[(5 * i * i + stem * 31 + i) % 120 for i in range(120)] for stem in range(3)]


def random_request(rng: random.Random, request_id: str, *, longest: int = 60, most: int = 12) -> object:
    stem = rng.choice(STEMS)
    tokens = [*stem[: rng.randrange(1, longest)], *((rng.randrange(3),) * rng.randrange(3))]
    return make_request(request_id, tokens, max_tokens=rng.randrange(1, most + 1), ignore_eos=True)


def check_answers(paper: Paper) -> None:
    assert set(paper.finishes) == set(paper.requests)
    for request_id, finish in paper.finishes.items():
        assert finish.reason is FinishReason.LENGTH, finish
        assert paper.answers[request_id] == paper.truth(request_id)


@pytest.mark.parametrize("seed", range(24))
def test_a_step_is_within_its_budget_and_starves_nobody(seed: int) -> None:
    """With pages enough: every decoding sequence runs in every step, and so does the first prompt."""
    rng = random.Random(seed)
    chunk_tokens, page_size = rng.choice((4, 10, 16, 64)), rng.choice((2, 4, 8))
    paper = make_paper(
        chunk_tokens=chunk_tokens,
        page_size=page_size,
        max_running=rng.choice((1, 3, 20)),
        num_full_pages=2000,
        num_window_pages=2000,
    )
    num_asked = 0
    for _ in range(60):
        while rng.random() < 0.4:
            paper.submit(random_request(rng, f"r{num_asked}"))  # type: ignore[arg-type]
            num_asked += 1
        if rng.random() < 0.1:
            paper.cache.device._ledger.evict_window(rng.choice((2, 10, 1000)))
        running = list(paper.scheduler._roster.running.values())
        decoding = {sequence.request_id for sequence in running if sequence.is_decoding}
        prompts = [sequence for sequence in running if not sequence.is_decoding]
        first = paper.scheduler._roster.waiting.first()
        left = 1 if not prompts or prompts[0].is_healing else prompts[0].num_remaining
        plan = paper.step()
        planned = {step.request_id: num_new(step) for step in plan.steps}
        assert decoding <= planned.keys()
        assert all(planned[request_id] == 1 for request_id in decoding)
        budget = max(chunk_tokens - len(decoding), page_size)
        assert sum(planned.values()) - len(decoding) <= budget
        if prompts:
            # The first prompt gets what there is, but for the part of a page at the end.
            assert planned[prompts[0].request_id] >= min(left, max(1, budget - page_size + 1))
        elif first is not None and len(running) < paper.scheduler._config.max_running:
            assert first[0].request_id in planned
    paper.run()
    check_answers(paper)
    assert paper.scheduler.counters.retractions == 0
    paper.assert_nothing_leased()


NUM_PRESSED = scaled(300)


def test_memory_pressure_shows_in_no_answer() -> None:
    """Tiny pools: sequences are put back over and over; each ends once, with every token once and in its place."""
    num_retractions = num_healed = num_passed = 0
    for seed in range(NUM_PRESSED):
        rng = random.Random(seed)
        page_size = rng.choice((1, 2, 4))
        window_tokens = rng.choice((3, 6))
        num_window_pages = 4 * (-(-window_tokens // page_size) + 3) + rng.randrange(8)
        paper = make_paper(
            chunk_tokens=rng.choice((2, 5, 16)),
            page_size=page_size,
            window_tokens=window_tokens,
            reach=window_tokens,
            max_running=4,
            num_full_pages=-(-64 // page_size) + rng.randrange(1, 5),
            num_window_pages=num_window_pages,
            release_interval_tokens=rng.choice((1, 4)),
        )
        num_asked = rng.randrange(2, 9)
        for number in range(num_asked):
            request = random_request(rng, f"r{number}", longest=rng.choice((12, 30)), most=30)
            paper.submit(request)  # type: ignore[arg-type]
            for _ in range(rng.randrange(4)):
                paper.step()
            if rng.random() < 0.3:
                paper.cache.device._ledger.evict_window(rng.choice((2, 1000)))
        try:
            # Each token is computed, and computed again each time its sequence is put back.
            paper.run(max_steps=2000, pass_s=0.01)
            check_answers(paper)
            paper.assert_nothing_leased()
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
        num_retractions += paper.scheduler.counters.retractions
        num_healed += paper.scheduler.counters.healed_hits
        num_passed += paper.scheduler.counters.passed_over
    assert num_retractions > NUM_PRESSED // 4
    assert num_healed > NUM_PRESSED // 10
    assert num_passed > 0


def test_who_was_put_back_keeps_its_place() -> None:
    """It came first, so it goes on first: before those that came after it and are as long."""
    paper = make_paper(num_full_pages=20, num_window_pages=40, max_running=3, chunk_tokens=64)
    for number in range(6):
        tokens = [number * 7 + i for i in range(20)]
        paper.submit(make_request(f"r{number}", tokens, max_tokens=30, ignore_eos=True))
        paper.clock.advance(0.001)
    paper.run()
    check_answers(paper)
    assert paper.scheduler.counters.retractions > 0
    assert list(paper.finishes) == [f"r{number}" for number in range(6)]
    paper.assert_nothing_leased()


def test_two_that_fill_the_memory_do_not_put_each_other_back_for_ever() -> None:
    """The earliest admitted is never put back, so every step brings one of them on."""
    paper = make_paper(num_full_pages=17, num_window_pages=20, max_running=2, chunk_tokens=8)
    for number in range(2):
        tokens = [number * 7 + i for i in range(8)]
        paper.submit(make_request(f"r{number}", tokens, max_tokens=50, ignore_eos=True))
    assert paper.run() < 200
    check_answers(paper)
    assert 0 < paper.scheduler.counters.retractions < 10
