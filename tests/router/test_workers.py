"""Liveness, mailboxes and late messages of the fleet, over the memory transport and a clock that is set by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from encoder.types import Farewell, Goodbye
from epd.errors import StageUnavailable
from epd.router.attempts import Event, Lost
from epd.router.workers import Fleet
from epd.transport.base import Received, WorkerDown
from epd.transport.memory import MemoryEndpoint, MemoryNetwork
from epd.types import (
    Abort,
    ExpectKv,
    Finish,
    FinishReason,
    GenerateRequest,
    Hello,
    KvRefused,
    Role,
    SamplingParams,
    Submit,
    TokenDelta,
    Usage,
    WorkerInfo,
)

USAGE = Usage(prompt_tokens=1, completion_tokens=1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Hand:
    """A worker driven by the test, message by message."""

    def __init__(self, network: MemoryNetwork, address: str, role: Role) -> None:
        self.network = network
        self.address = address
        self.role = role
        self.endpoint: MemoryEndpoint = network.endpoint(address)
        self.last: Received | None = None

    async def expect(self, kind: type) -> Received:
        """The next message of this kind; heartbeats in between are skipped."""
        for _ in range(200):
            for received in self.endpoint.receive(0):
                if isinstance(received.message, kind):
                    self.last = received
                    return received
                assert isinstance(received.message, Hello), received
            await asyncio.sleep(0)
        raise AssertionError(f"{self.address} got no {kind.__name__}")

    async def quiet(self) -> None:
        for _ in range(20):
            assert all(isinstance(received.message, Hello) for received in self.endpoint.receive(0))
            await asyncio.sleep(0)

    async def answer_hello(self, incarnation: str = "one", *, ready: bool = True, kv_fingerprint: str = "") -> None:
        received = await self.expect(Hello)
        self.say_info(received, incarnation, ready=ready, kv_fingerprint=kv_fingerprint)
        await asyncio.sleep(0.002)

    def say_info(
        self,
        received: Received,
        incarnation: str,
        *,
        ready: bool = True,
        sequence: int = 0,
        num_running: int = 0,
        kv_fingerprint: str = "",
    ) -> None:
        info = WorkerInfo(
            sequence=sequence,
            worker=self.address,
            incarnation=incarnation,
            role=self.role,
            address=self.address,
            model="m",
            max_context_tokens=100,
            eos_token_ids=(),
            num_waiting=0,
            num_running=num_running,
            full_pages_free=1,
            full_pages_total=1,
            window_pages_free=1,
            window_pages_total=1,
            ready=ready,
            kv_fingerprint=kv_fingerprint,
        )
        self.endpoint.send(received.peer, info)

    def restart(self) -> None:
        self.endpoint.close()
        self.endpoint = self.network.endpoint(self.address)


def request(request_id: str = "r#1") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1)
    return GenerateRequest(
        request_id=request_id, token_ids=(1, 2), sampling=sampling, arrival_unix_s=0, deadline_unix_s=1
    )


@asynccontextmanager
async def fleet_of(
    *roles: Role, clock: Clock | None = None, heartbeat_s: float = 3600.0
) -> AsyncIterator[tuple[Fleet, list[Hand], Clock]]:
    network, clock = MemoryNetwork(), clock or Clock()
    hands = [Hand(network, f"memory://{i}", role) for i, role in enumerate(roles)]
    fleet = Fleet(
        prefill=[network.channel(hand.address) for hand in hands if hand.role is not Role.DECODE],
        decode=[network.channel(hand.address) for hand in hands if hand.role is Role.DECODE],
        heartbeat_s=heartbeat_s,
        timeout_s=5.0,
        clock=clock,
    )
    fleet.start()
    try:
        yield fleet, hands, clock
    finally:
        await fleet.stop()


async def soon(fleet: Fleet, attempt_events: "asyncio.Future[Event] | asyncio.Task[Event]") -> Event:
    return await asyncio.wait_for(attempt_events, 1.0)


async def test_a_worker_is_used_once_it_has_said_it_is_ready() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        assert fleet.max_context_tokens() is None
        with pytest.raises(StageUnavailable, match="both"):
            await fleet.submit(request(), give_up_s=clock.now_s)
        await hand.answer_hello(ready=False)
        assert "takes no new work" in (fleet.workers[0].why_not_ready() or "")
        waiting = asyncio.create_task(fleet.submit(request(), give_up_s=clock.now_s + 10))
        await asyncio.sleep(0.005)
        assert not waiting.done()
        fleet.tick()
        await hand.answer_hello()
        attempt = await asyncio.wait_for(waiting, 1)
        received = await hand.expect(Submit)
        assert received.message == Submit(request=request())
        assert fleet.max_context_tokens() == 100
        fleet.close(attempt)
        assert isinstance((await hand.expect(Abort)).message, Abort)


async def test_messages_reach_their_attempt_and_a_finished_one_is_not_aborted() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        await hand.answer_hello()
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        peer = (await hand.expect(Submit)).peer
        delta = TokenDelta(request_id="r#1", index=0, token_ids=(4,))
        finish = Finish(request_id="r#1", reason=FinishReason.STOP, usage=USAGE)
        hand.endpoint.send(peer, delta)
        hand.endpoint.send(peer, finish)
        assert [await attempt.next_event(), await attempt.next_event()] == [delta, finish]
        fleet.close(attempt)
        fleet.close(attempt)
        await hand.quiet()


async def test_split_roles_get_the_expectation_first_and_the_address() -> None:
    async with fleet_of(Role.PREFILL, Role.DECODE) as (fleet, (prefill, decode), clock):
        await prefill.answer_hello("p")
        await decode.answer_hello("d")
        await fleet.submit(request(), give_up_s=clock.now_s)
        assert (await decode.expect(ExpectKv)).message == ExpectKv(request=request())
        submit = (await prefill.expect(Submit)).message
        assert submit == Submit(request=request(), decode_address=decode.address, decode_incarnation="d")


async def test_a_refused_transfer_is_a_failure_that_may_be_retried() -> None:
    async with fleet_of(Role.PREFILL, Role.DECODE) as (fleet, (prefill, decode), clock):
        await prefill.answer_hello()
        await decode.answer_hello()
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        peer = (await decode.expect(ExpectKv)).peer
        decode.endpoint.send(peer, KvRefused(request_id="r#1", message="full"))
        event = await attempt.next_event()
        assert isinstance(event, Finish)
        assert event.retryable
        fleet.close(attempt)
        assert isinstance((await prefill.expect(Submit)).message, Submit)
        await prefill.expect(Abort)


async def test_a_farewell_is_answered_after_all_before_it_was_read_and_no_request_follows() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        await hand.answer_hello()
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        peer = (await hand.expect(Submit)).peer
        finish = Finish(request_id="r#1", reason=FinishReason.STOP, usage=USAGE)
        hand.endpoint.send(peer, finish)
        hand.endpoint.send(peer, Farewell(sequence=3))
        assert (await hand.expect(Goodbye)).message == Goodbye(sequence=3)
        assert await asyncio.wait_for(attempt.next_event(), 1) == finish
        with pytest.raises(StageUnavailable, match="both"):
            await fleet.submit(request("r#2"), give_up_s=clock.now_s)
        fleet.close(attempt)
        await hand.quiet()


@pytest.mark.parametrize("how", ["disconnect", "incarnation", "silence"])
async def test_a_lost_worker_is_told_to_its_attempts(how: str) -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        await hand.answer_hello("one")
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        received = await hand.expect(Submit)
        match how:
            case "disconnect":
                hand.endpoint.close()
            case "incarnation":
                hand.say_info(received, "two")
            case _:
                clock.now_s += 4.0
                fleet.tick()
                await hand.quiet()
                clock.now_s += 2.0
                fleet.tick()
        event = await asyncio.wait_for(attempt.next_event(), 1)
        assert isinstance(event, Lost)
        assert event.worker == hand.address
        fleet.close(attempt)


async def test_a_restarted_worker_is_used_again_with_its_new_incarnation() -> None:
    async with fleet_of(Role.PREFILL, Role.DECODE) as (fleet, (prefill, decode), clock):
        await prefill.answer_hello()
        await decode.answer_hello("old")
        decode.restart()
        await asyncio.sleep(0.005)
        assert not fleet.workers[1].ready
        await decode.answer_hello("new")
        await fleet.submit(request(), give_up_s=clock.now_s)
        submit = (await prefill.expect(Submit)).message
        assert isinstance(submit, Submit)
        assert submit.decode_incarnation == "new"


async def test_a_late_delta_is_aborted_once_per_attempt() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), _):
        received = await hand.expect(Hello)
        for index in range(3):
            hand.endpoint.send(received.peer, TokenDelta(request_id="old#1", index=index, token_ids=(1,)))
        hand.endpoint.send(received.peer, Finish(request_id="old#1", reason=FinishReason.STOP, usage=USAGE))
        assert (await hand.expect(Abort)).message == Abort(request_id="old#1")
        await hand.quiet()
        assert fleet.num_late_messages == 4


async def test_cancelling_a_wait_leaves_nothing() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        waiting = asyncio.create_task(fleet.submit(request(), give_up_s=clock.now_s + 10))
        await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await hand.answer_hello()
        assert not fleet.workers[0].attempts
        await hand.quiet()


async def test_a_worker_that_hands_a_request_back_is_asked_before_it_gets_another() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        await hand.answer_hello()
        first = await fleet.submit(request("r#1"), give_up_s=clock.now_s)
        received = await hand.expect(Submit)
        failed = Finish(request_id="r#1", reason=FinishReason.FAILED, usage=USAGE, status=503, retryable=True)
        hand.endpoint.send(received.peer, failed)
        assert await first.next_event() == failed
        fleet.close(first)
        second = asyncio.create_task(fleet.submit(request("r#2"), give_up_s=clock.now_s + 10))
        await asyncio.sleep(0.005)
        assert not second.done()
        await hand.answer_hello()
        fleet.close(await asyncio.wait_for(second, 1))


async def test_a_request_that_is_sent_again_has_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill breaks between the choice and the send. Decode has heard of the request and of its end by then, and would
    drop whatever else came under the same id."""
    async with fleet_of(Role.PREFILL, Role.DECODE) as (fleet, (prefill, decode), clock):
        for hand in (prefill, decode):
            await hand.answer_hello()
        channel = next(worker.channel for worker in fleet.workers if worker.role is Role.PREFILL)
        send = channel.send

        async def broken(*message: Any) -> None:
            if isinstance(message[0], Submit):
                monkeypatch.setattr(channel, "send", send)
                raise WorkerDown("the connection broke")
            await send(*message)

        monkeypatch.setattr(channel, "send", broken)
        attempt = await fleet.submit(request("r#1"), give_up_s=clock.now_s + 10)
        heard: dict[str, list[Received]] = {prefill.address: [], decode.address: []}
        for _ in range(20):
            for hand in (prefill, decode):
                told = hand.endpoint.receive(0)
                heard[hand.address] += [received for received in told if not isinstance(received.message, Hello)]
            await asyncio.sleep(0)
        first, ended, again = (received.message for received in heard[decode.address])
        assert isinstance(first, ExpectKv)
        assert ended == Abort(request_id="r#1")
        assert isinstance(again, ExpectKv)
        submitted = heard[prefill.address][-1].message
        assert isinstance(submitted, Submit)
        assert (first.request.request_id, again.request.request_id) == ("r#1", "r#1.2")
        assert submitted.request.request_id == attempt.request_id == "r#1.2"
        delta = TokenDelta(request_id="r#1.2", index=0, token_ids=(4,))
        decode.endpoint.send(heard[decode.address][-1].peer, delta)
        assert await attempt.next_event() == delta
        fleet.close(attempt)


async def beats(fleet: Fleet, hands: list[Hand], num_running: list[int], count: int) -> None:
    """Heartbeats that every worker answers with the number of requests it holds."""
    for _ in range(count):
        fleet.tick()
        for hand, running in zip(hands, num_running, strict=True):
            received = await hand.expect(Hello)
            assert isinstance(received.message, Hello)
            hand.say_info(received, "one", sequence=received.message.sequence, num_running=running)
        await asyncio.sleep(0.002)


async def test_a_request_that_no_worker_knows_is_lost() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        await hand.answer_hello("one")
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        await hand.expect(Submit)
        await beats(fleet, [hand], [1], 12)
        assert attempt._events.empty()
        await beats(fleet, [hand], [0], 12)
        event = await soon(fleet, asyncio.ensure_future(attempt.next_event()))
        assert event == Lost(hand.address, "does not know the request any more")
        assert fleet.workers[0].ready, "the worker itself is well"


async def test_a_request_that_one_of_two_workers_holds_is_not_lost() -> None:
    async with fleet_of(Role.PREFILL, Role.DECODE) as (fleet, hands, clock):
        for hand in hands:
            await hand.answer_hello("one")
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        await hands[0].expect(Submit)
        await hands[1].expect(ExpectKv)
        await beats(fleet, hands, [1, 0], 12)
        await beats(fleet, hands, [0, 1], 12)
        assert attempt._events.empty()
        await beats(fleet, hands, [0, 0], 12)
        assert isinstance(await soon(fleet, asyncio.ensure_future(attempt.next_event())), Lost)


async def test_a_gateway_that_stood_still_does_not_blame_the_workers() -> None:
    async with fleet_of(Role.BOTH, heartbeat_s=1.0) as (fleet, (hand,), clock):
        await hand.answer_hello("one")
        attempt = await fleet.submit(request(), give_up_s=clock.now_s)
        clock.now_s += 60.0
        fleet.tick()
        assert attempt._events.empty()
        assert fleet.workers[0].ready


async def test_a_fleet_that_stops_waits_for_no_stage() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        waiting = asyncio.create_task(fleet.submit(request(), give_up_s=clock.now_s + 3600))
        await asyncio.sleep(0.005)
        fleet.stop_waiting()
        with pytest.raises(StageUnavailable):
            await asyncio.wait_for(waiting, 1)
        await hand.answer_hello("one")
        fleet.close(await fleet.submit(request(), give_up_s=clock.now_s))


async def test_only_workers_that_hold_kv_alike_are_paired() -> None:
    async with fleet_of(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE) as (fleet, hands, clock):
        for hand, kind in zip(hands, ("odd", "even", "even", "other"), strict=True):
            await hand.answer_hello(kv_fingerprint=kind)
        reasons = [fleet.why_not_ready(worker) for worker in fleet.workers]
        assert [reason is None for reason in reasons] == [False, True, True, False]
        assert "memory://0: no decode worker holds KV as this one does" in str(reasons[0])
        assert "memory://3: no prefill worker" in str(reasons[3])
        for number in range(8):
            # Being avoided does not make another pair of them.
            attempt = await fleet.submit(
                request(f"r{number}"), give_up_s=0.0, avoid=("memory://1",) if number % 2 else ()
            )
            assert [worker.address for worker in attempt.workers] == ["memory://1", "memory://2"]
        fleet.workers[1].info = None
        with pytest.raises(StageUnavailable, match="no two workers of the stages prefill and decode hold KV in the"):
            await fleet.submit(request("last"), give_up_s=clock())
        fleet.workers[0].info = None
        with pytest.raises(StageUnavailable, match="no worker is ready for: prefill"):
            await fleet.submit(request("last"), give_up_s=clock())


async def test_both_workers_of_a_pair_are_of_one_kind() -> None:
    async with fleet_of(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE) as (fleet, hands, _):
        for hand, kind in zip(hands, ("odd", "even", "odd", "even"), strict=True):
            await hand.answer_hello(kv_fingerprint=kind)
        assert [fleet.why_not_ready(worker) for worker in fleet.workers] == [None] * 4
        seen = set()
        for number in range(16):
            attempt = await fleet.submit(request(f"r{number}"), give_up_s=0.0, avoid=(f"memory://{number % 4}",))
            kinds = {worker.info.kv_fingerprint for worker in attempt.workers if worker.info is not None}
            assert len(kinds) == 1
            seen |= kinds
        assert seen == {"odd", "even"}


async def test_one_that_answers_no_more_is_told_apart_from_one_that_never_did() -> None:
    async with fleet_of(Role.BOTH) as (fleet, (hand,), clock):
        (worker,) = fleet.workers
        assert worker.why_not_ready() == "memory://0: has not answered yet"
        await hand.answer_hello()
        assert worker.why_not_ready() is None
        clock.now_s += 6.0
        # Since the tick before, so that it was not this process that stood still.
        fleet._ticked_s = clock.now_s
        fleet.tick()
        clock.now_s += 10.0
        assert worker.why_not_ready() == "memory://0: does not answer, for 16 s now"
        await hand.answer_hello()
        assert worker.why_not_ready() is None
