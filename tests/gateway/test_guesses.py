"""Wrong keys by the hundred: they wait, and who has a right one is served."""

from __future__ import annotations

import asyncio

import pytest

from epd.errors import InvalidApiKey, TooManyRequests
from epd.gateway.guesses import FREE_FAILURES, Guesses
from epd.gateway.keys import ApiKeys
from tests.fakes.gateway import running_gateway


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def guesses(time: Time, *keys: str) -> Guesses:
    return Guesses(ApiKeys(keys), clock=time.clock, sleep=time.sleep)


async def fail(looking: Guesses, key: bytes, remote: str = "10.0.0.1") -> str:
    with pytest.raises((InvalidApiKey, TooManyRequests)) as caught:
        await looking.check(key, remote)
    return type(caught.value).__name__


async def test_after_many_wrong_ones_each_waits_a_second() -> None:
    time = Time()
    looking = guesses(time, "right", "seldom")
    await looking.check(b"right", "10.0.0.1")
    told = [await fail(looking, b"guess %d" % number) for number in range(FREE_FAILURES)]
    assert set(told) == {"InvalidApiKey"}
    assert time.now_s == 100.0
    told = [await fail(looking, b"more %d" % number) for number in range(30)]
    assert set(told) == {"TooManyRequests"}
    assert time.now_s == pytest.approx(130.0, abs=1.5)
    # Known from here: at once. Not yet known: it waits like a guess, and is right. Elsewhere: nobody's fault.
    before_s = time.now_s
    for _ in range(100):
        await looking.check(b"right", "10.0.0.1")
    await looking.check(b"seldom", "10.0.0.2")
    assert time.now_s == before_s
    await looking.check(b"seldom", "10.0.0.1")
    assert 0 < time.now_s - before_s < 2.0
    assert await fail(looking, b"") == "InvalidApiKey", "no key is no guess"
    time.now_s += 3600
    assert await fail(looking, b"guess") == "InvalidApiKey"


async def test_many_at_the_same_time_are_not_looked_at() -> None:
    looked: list[bytes] = []

    class Counted(ApiKeys):
        def accepts(self, candidate: bytes) -> bool:
            looked.append(candidate)
            return super().accepts(candidate)

    gate = asyncio.Event()

    async def until_opened(_: float) -> None:
        await gate.wait()

    looking = Guesses(Counted(["right"]), clock=lambda: 100.0, sleep=until_opened)
    told = [asyncio.create_task(fail(looking, b"guess %d" % number)) for number in range(500)]
    await asyncio.sleep(0.05)
    assert len(looked) == FREE_FAILURES
    gate.set()
    outcomes = await asyncio.gather(*told)
    assert outcomes.count("InvalidApiKey") == FREE_FAILURES
    assert len(looked) == FREE_FAILURES + 30


async def test_a_network_of_version_6_is_one_place_and_a_key_may_be_withdrawn() -> None:
    time = Time()
    keys = ApiKeys(["right"])
    looking = Guesses(keys, clock=time.clock, sleep=time.sleep)
    await looking.check(b"right", "2001:db8::1")
    keys._fixed = ()
    told = [await fail(looking, b"right", f"2001:db8::{number:x}") for number in range(1, FREE_FAILURES + 2)]
    assert told == ["InvalidApiKey"] * FREE_FAILURES + ["TooManyRequests"]


async def test_a_client_is_told_and_an_honest_one_served() -> None:
    async with running_gateway(api_keys=("one",)) as stack:
        url = "/v1/models"
        async with stack.session.get(url, headers={"Authorization": "Bearer one"}) as answer:
            assert answer.status == 200
        statuses = []
        for number in range(FREE_FAILURES + 2):
            async with stack.session.get(url, headers={"Authorization": f"Bearer {number}"}) as answer:
                statuses.append(answer.status)
                if answer.status == 429:
                    assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
                    assert answer.headers["Retry-After"]
                    assert answer.headers["X-RateLimit-Remaining-Requests"] == "0"
        assert (statuses[0], statuses[-1]) == (401, 429)
        async with stack.session.get(url, headers={"Authorization": "Bearer one"}) as answer:
            assert answer.status == 200
