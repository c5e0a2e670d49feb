"""Workers that join and leave a fleet while it serves."""

import asyncio

import pytest

from epd.errors import StageUnavailable
from epd.router.attempts import Lost
from epd.router.workers import Fleet
from epd.transport.base import Received
from epd.transport.memory import MemoryEndpoint, MemoryNetwork
from epd.types import Finish, FinishReason, GenerateRequest, Hello, Role, SamplingParams, Submit, Usage, WorkerInfo


class Workers:
    """A fleet of one stage over the memory transport; workers are played by the test."""

    def __init__(self, *, model: str | None = None) -> None:
        self.network = MemoryNetwork()
        self.endpoints: dict[str, MemoryEndpoint] = {}
        self.fleet = Fleet(
            prefill=[], decode=[], heartbeat_s=3600.0, timeout_s=5.0, clock=lambda: 0.0, has_decode=False, model=model
        )

    async def join(self, address: str, *, role: Role = Role.BOTH, model: str = "m") -> None:
        self.endpoints[address] = self.network.endpoint(address)
        self.fleet.add(self.network.channel(address), Role.BOTH)
        await self.answer(address, role=role, model=model)

    async def answer(self, address: str, *, role: Role = Role.BOTH, model: str = "m") -> None:
        peer = (await self.next(address, Hello)).peer
        info = WorkerInfo(
            sequence=0,
            worker=address,
            incarnation="one",
            role=role,
            address=address,
            model=model,
            max_context_tokens=100,
            eos_token_ids=(),
            num_waiting=0,
            num_running=0,
            full_pages_free=1,
            full_pages_total=1,
            window_pages_free=1,
            window_pages_total=1,
            ready=True,
        )
        self.endpoints[address].send(peer, info)
        await asyncio.sleep(0.005)

    async def next(self, address: str, kind: type) -> Received:
        for _ in range(200):
            for received in self.endpoints[address].receive(0):
                if isinstance(received.message, kind):
                    return received
            await asyncio.sleep(0)
        raise AssertionError(f"{address} got no {kind.__name__}")

    async def ask(self, request_id: str) -> str:
        """Submit; the address that was chosen."""
        sampling = SamplingParams(max_tokens=1)
        request = GenerateRequest(
            request_id=request_id, token_ids=(1,), sampling=sampling, arrival_unix_s=0, deadline_unix_s=1
        )
        self.attempt = await self.fleet.submit(request, give_up_s=0.0)
        return self.attempt.workers[0].address


async def test_a_worker_joins_a_fleet_that_had_none() -> None:
    workers = Workers()
    workers.fleet.start()
    assert workers.fleet.roles == (Role.BOTH,)
    with pytest.raises(StageUnavailable, match="no worker is ready for: both"):
        await workers.ask("a")
    await workers.join("x")
    assert await workers.ask("b") == "x"
    await workers.fleet.stop()


async def test_a_stage_is_there_though_nobody_is_known_in_it() -> None:
    fleet = Fleet(prefill=[], decode=[], heartbeat_s=1.0, timeout_s=1.0, clock=lambda: 0.0, has_decode=True)
    assert fleet.roles == (Role.PREFILL, Role.DECODE)


async def test_a_retired_worker_ends_what_it_has_and_is_forgotten_then() -> None:
    workers = Workers()
    workers.fleet.start()
    await workers.join("x")
    assert await workers.ask("a") == "x"
    first = workers.attempt
    workers.fleet.retire("x", Role.BOTH)
    assert workers.fleet.workers[0].why_not_ready() == "x: no longer listed"
    with pytest.raises(StageUnavailable):
        await workers.ask("b")
    await workers.join("y")
    assert await workers.ask("c") == "y"
    workers.fleet.tick()
    assert [worker.address for worker in workers.fleet.workers] == ["x", "y"]
    peer = (await workers.next("x", Submit)).peer
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    finish = Finish(request_id="a", reason=FinishReason.STOP, usage=usage)
    workers.endpoints["x"].send(peer, finish)
    assert await asyncio.wait_for(first.next_event(), 1) == finish
    workers.fleet.close(first)
    workers.fleet.tick()
    assert [worker.address for worker in workers.fleet.workers] == ["y"]
    await workers.fleet.stop()


async def test_one_that_is_listed_again_is_the_same_worker() -> None:
    workers = Workers()
    workers.fleet.start()
    await workers.join("x")
    workers.fleet.retire("x", Role.BOTH)
    workers.fleet.add(workers.network.channel("x"), Role.BOTH)
    assert len(workers.fleet.workers) == 1
    assert await workers.ask("a") == "x"
    await workers.fleet.stop()


async def test_a_retired_worker_that_dies_loses_its_requests_once() -> None:
    workers = Workers()
    workers.fleet.start()
    await workers.join("x")
    await workers.ask("a")
    workers.fleet.retire("x", Role.BOTH)
    workers.endpoints["x"].close()
    event = await asyncio.wait_for(workers.attempt.next_event(), 1)
    assert isinstance(event, Lost)
    workers.fleet.close(workers.attempt)
    workers.fleet.tick()
    assert workers.fleet.workers == []
    await workers.fleet.stop()


@pytest.mark.parametrize(
    ("role", "model", "words"),
    [(Role.DECODE, "m", "x: is a decode worker, not a both worker"), (Role.BOTH, "other", "x: serves other, not m")],
)
async def test_who_serves_something_else_gets_nothing(role: Role, model: str, words: str) -> None:
    """An address given for the wrong stage, or taken over by somebody else's pod."""
    workers = Workers(model="m")
    workers.fleet.start()
    await workers.join("x", role=role, model=model)
    assert workers.fleet.workers[0].why_not_ready() == words
    with pytest.raises(StageUnavailable):
        await workers.ask("a")
    await workers.fleet.stop()


async def test_one_address_given_for_two_stages_is_two_workers_that_both_stop() -> None:
    network = MemoryNetwork()
    fleet = Fleet(
        prefill=[network.channel("x")],
        decode=[network.channel("x")],
        heartbeat_s=3600.0,
        timeout_s=5.0,
        clock=lambda: 0.0,
    )
    before = asyncio.all_tasks()
    fleet.start()
    assert len(asyncio.all_tasks() - before) == 3
    await fleet.stop()
    assert asyncio.all_tasks() == before
