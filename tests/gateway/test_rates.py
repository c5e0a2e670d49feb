"""Limits of one client, against a plain count of what came before."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import TooManyRequests
from epd.gateway import rates
from epd.gateway.rates import RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def limiter(clock: Clock, *, per_minute: int = 0, burst: int = 0, max_inflight: int = 0) -> RateLimiter:
    return RateLimiter(per_minute=per_minute, burst=burst, max_inflight=max_inflight, clock=clock)


def passes(limits: RateLimiter, name: str) -> bool:
    try:
        with limits.place(name):
            return True
    except TooManyRequests:
        return False


@given(
    per_minute=st.integers(1, 120),
    burst=st.integers(1, 20),
    waits=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0, 60.0, 600.0]), max_size=60),
)
def test_as_a_bucket_that_is_filled_in_small_steps(per_minute: int, burst: int, waits: list[float]) -> None:
    """The oracle keeps thousandths of a request as whole numbers and fills them at every tenth of a second."""
    clock = Clock()
    limits = limiter(clock, per_minute=per_minute, burst=burst)
    level = burst * 600
    for wait_s in waits:
        clock.now_s += wait_s
        level = min(burst * 600, level + round(wait_s * 10) * per_minute)
        expected = level >= 600
        # Where the two round differently either answer is right.
        if abs(level - 600) > 1:
            assert passes(limits, "a") is expected
            level -= 600 * expected
        elif passes(limits, "a"):
            level -= 600


def test_refusals_say_when_to_come_back_and_cost_nothing() -> None:
    clock = Clock()
    limits = limiter(clock, per_minute=60, burst=2)
    assert [passes(limits, "a") for _ in range(3)] == [True, True, False]
    with pytest.raises(TooManyRequests) as caught, limits.place("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert "60" in caught.value.message
    assert passes(limits, "b")
    clock.now_s += 1.0
    with limits.place("a") as headers:
        assert headers["X-RateLimit-Limit-Requests"] == "60"
        assert headers["X-RateLimit-Remaining-Requests"] == "0"
        assert headers["X-RateLimit-Reset-Requests"] == "2.000s"


def test_places_in_flight() -> None:
    limits = limiter(Clock(), max_inflight=2)
    with ExitStack() as stack:
        stack.enter_context(limits.place("a"))
        with limits.place("a"):
            assert not passes(limits, "a")
            assert passes(limits, "b")
        assert passes(limits, "a")
    assert [passes(limits, "a") for _ in range(5)] == [True] * 5


def test_clients_are_forgotten_but_not_those_with_something_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_MAX_CLIENTS", 3)
    limits = limiter(Clock(), per_minute=1, max_inflight=1)
    with limits.place("held"):
        for name in "abcdef":
            assert passes(limits, name)
        assert not passes(limits, "held")
        assert len(limits._clients) == 3
    assert not passes(limits, "f")
    assert passes(limits, "a")
