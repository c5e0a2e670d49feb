"""Workers as they run: threads over both transports, and a process that is told to stop."""

import asyncio
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from encoder.types import Farewell, Goodbye
from epd.config import EngineConfig
from epd.engine.worker import EngineThread, run_worker
from epd.kv.errors import PoolTooSmall
from epd.transport.base import Channel, Endpoint
from epd.transport.memory import MemoryNetwork
from epd.transport.sockets import WorkerChannel, WorkerEndpoint
from epd.types import (
    ExpectKv,
    Finish,
    FinishReason,
    GenerateRequest,
    Hello,
    Role,
    SamplingParams,
    Submit,
    TokenDelta,
    WorkerInfo,
)
from tests.engine.conftest import Checkpoint, make_request
from tests.oracles.plain_generate import plain_generate

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(75)]
FAR_S = 600.0
# No test is about speed: a machine that does nothing else takes a second where a busy one takes minutes.
PATIENCE_S = 250.0


def config(folder: Path, role: Role) -> EngineConfig:
    return EngineConfig(
        model_dir=folder,
        model_name="tiny",
        role=role,
        page_size=4,
        kv_budget_bytes=4 << 20,
        expected_sequence_tokens=128,
        chunk_tokens=64,
        decode_release_interval_tokens=8,
    )


class Client:
    """The least a gateway does: collect what channels say."""

    def __init__(self, *channels: Channel, answers_farewells: bool = True) -> None:
        self.tokens: dict[str, dict[int, int]] = {}
        self.finishes: dict[str, Finish] = {}
        self.infos: list[WorkerInfo] = []
        self.farewells: list[int] = []
        self.answers_farewells = answers_farewells
        self.changed = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._listen(channel)) for channel in channels]

    async def _listen(self, channel: Channel) -> None:
        while True:
            message, _ = await channel.receive()
            async with self.changed:
                match message:
                    case TokenDelta():
                        known = self.tokens.setdefault(message.request_id, {})
                        known.update(enumerate(message.token_ids, message.index))
                    case Finish():
                        assert message.request_id not in self.finishes
                        self.finishes[message.request_id] = message
                    case WorkerInfo():
                        self.infos.append(message)
                    case Farewell(sequence=sequence):
                        self.farewells.append(sequence)
                        if self.answers_farewells:
                            await channel.send(Goodbye(sequence=sequence))
                self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    def answer(self, request_id: str) -> list[int]:
        known = self.tokens[request_id]
        return [known[index] for index in range(len(known))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


Pair = tuple[Channel, Channel]


@pytest.fixture(params=["ipc", "memory"])
async def pair(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> AsyncIterator[Pair]:
    network = MemoryNetwork()
    endpoints: list[Endpoint] = []
    channels: list[Channel] = []
    for name in ("prefill", "decode"):
        if request.param == "ipc":
            address = f"ipc://{tmp_path}/{name}"
            endpoints.append(WorkerEndpoint(address))
            channels.append(WorkerChannel(address))
        else:
            endpoints.append(network.endpoint(name))
            channels.append(network.channel(name))
    roles = (Role.PREFILL, Role.DECODE)
    threads = [EngineThread(config(checkpoint.folder, r), e) for r, e in zip(roles, endpoints, strict=True)]
    for thread in threads:
        thread.start()
    for channel in channels:
        channel.open()
        await asyncio.wait_for(channel.wait_connected(), PATIENCE_S)
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()
    for thread in threads:
        await asyncio.to_thread(thread.stop)
        thread.engine.loop.check()


def request(request_id: str, token_ids: list[int], max_tokens: int = 12) -> GenerateRequest:
    return make_request(
        request_id, token_ids, max_tokens=max_tokens, ignore_eos=True, deadline_unix_s=time.time() + FAR_S
    )


async def test_prefill_and_decode_answer_together(pair: Pair, checkpoint: Checkpoint) -> None:
    prefill, decode = pair
    client = Client(prefill, decode)
    await decode.send(Hello(sequence=1))
    await client.until(lambda: bool(client.infos))
    info = client.infos[0]
    prompts = {f"r{i}": PROMPT[i:] + PROMPT[:i] for i in range(6)}
    for request_id, token_ids in prompts.items():
        asked = request(request_id, token_ids)
        await decode.send(ExpectKv(request=asked))
        await prefill.send(Submit(request=asked, decode_address=info.address, decode_incarnation=info.incarnation))
    await client.until(lambda: len(client.finishes) == len(prompts))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    for request_id, token_ids in prompts.items():
        await client.until(lambda request_id=request_id: len(client.tokens.get(request_id, ())) == 12)  # type: ignore[misc]
        assert client.answer(request_id) == plain_generate(checkpoint.model, token_ids, sampling)
        assert client.finishes[request_id].reason is FinishReason.LENGTH
    await client.close()


@dataclass
class WorkerProcess:
    """A worker in a process of its own, and a client that is connected to it."""

    pid: int
    channel: WorkerChannel
    client: Client
    join: Callable[[float], int | None]
    """Waits that many seconds for the process to end, without letting the event loop run; its exit code."""

    async def drain(self) -> None:
        """SIGTERM, and wait until the worker says that it takes nothing new."""
        os.kill(self.pid, signal.SIGTERM)
        while not any(not info.ready for info in self.client.infos):
            await self.channel.send(Hello(sequence=1))
            await asyncio.sleep(0.01)

    async def ended(self) -> int | None:
        await asyncio.wait_for(self.channel.wait_disconnected(), PATIENCE_S)
        return await asyncio.to_thread(self.join, PATIENCE_S)


@pytest.fixture
async def worker_process(checkpoint: Checkpoint, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    address = f"ipc://{tmp_path}/worker"
    process = multiprocessing.get_context("spawn").Process(
        target=run_worker,
        args=(replace(config(checkpoint.folder, Role.BOTH), peer_timeout_s=300.0),),
        kwargs={"address": address},
        daemon=True,
    )
    process.start()
    channel = WorkerChannel(address)
    channel.open()
    client = Client(channel)

    def join(timeout_s: float) -> int | None:
        process.join(timeout_s)
        return process.exitcode

    try:
        await asyncio.wait_for(channel.wait_connected(), PATIENCE_S)
        assert process.pid is not None
        yield WorkerProcess(process.pid, channel, client, join)
    finally:
        await client.close()
        channel.close()
        process.kill()
        process.join()


@pytest.mark.e2e
async def test_a_worker_process_drains_on_sigterm(worker_process: WorkerProcess) -> None:
    """Whatever the machine makes of it: the late request may come while the first one runs, or long after its end."""
    worker, client = worker_process, worker_process.client
    client.answers_farewells = False
    await worker.channel.send(Submit(request=request("running", PROMPT, max_tokens=300)))
    await client.until(lambda: bool(client.tokens))
    await worker.drain()
    await worker.channel.send(Submit(request=request("late", PROMPT)))
    client.answers_farewells = True
    for sequence in list(client.farewells):
        await worker.channel.send(Goodbye(sequence=sequence))
    await client.until(lambda: len(client.finishes) == 2)
    assert (client.finishes["late"].code, client.finishes["late"].retryable) == ("draining", True)
    assert client.finishes["running"].reason is FinishReason.LENGTH
    assert len(client.answer("running")) == 300
    assert await worker.ended() == 0


@pytest.mark.e2e
async def test_answers_wait_for_a_gateway_that_stands_still(worker_process: WorkerProcess) -> None:
    """What has arrived at a socket and was not read is lost when the other end closes: so it must not close."""
    worker, client = worker_process, worker_process.client
    await worker.channel.send(Submit(request=request("a", PROMPT, max_tokens=30)))
    await client.until(lambda: bool(client.tokens))
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.join(1.5) is None, "the answers were not read"
    await client.until(lambda: bool(client.finishes))
    assert len(client.answer("a")) == 30
    assert await worker.ended() == 0


async def test_a_request_that_crosses_the_farewell_is_refused_and_read(checkpoint: Checkpoint) -> None:
    network = MemoryNetwork()
    endpoint, channel = network.endpoint("worker"), network.channel("worker")
    worker = EngineThread(config(checkpoint.folder, Role.BOTH), endpoint)
    worker.start()
    channel.open()
    client = Client(channel, answers_farewells=False)
    await channel.send(Submit(request=request("a", PROMPT)))
    await client.until(lambda: bool(client.finishes))
    assert not await asyncio.to_thread(worker.drain, 0.1)
    await client.until(lambda: bool(client.farewells))
    await channel.send(Submit(request=request("crossing", PROMPT)))
    await channel.send(Goodbye(sequence=client.farewells[-1]))
    await client.until(lambda: "crossing" in client.finishes)
    assert client.finishes["crossing"].code == "draining"
    await client.until(lambda: len(client.farewells) >= 2)
    await channel.send(Goodbye(sequence=client.farewells[0]))
    assert not await asyncio.to_thread(worker.drain, 0.3), "the first goodbye says nothing about the refusal"
    client.answers_farewells = True
    await channel.send(Goodbye(sequence=client.farewells[-1]))
    assert await asyncio.to_thread(worker.drain, PATIENCE_S)
    await client.close()
    channel.close()
    worker.stop()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_gateway_that_says_no_goodbye_is_waited_for_in_bounds(checkpoint: Checkpoint, leaves: bool) -> None:
    """One that is gone is noticed by the next farewell, one that stands still costs `peer_timeout_s`."""
    network = MemoryNetwork()
    endpoint, channel = network.endpoint("worker"), network.channel("worker")
    settings = replace(config(checkpoint.folder, Role.BOTH), peer_timeout_s=300.0 if leaves else 0.5)
    worker = EngineThread(settings, endpoint)
    worker.start()
    channel.open()
    client = Client(channel, answers_farewells=False)
    await channel.send(Submit(request=request("a", PROMPT)))
    await client.until(lambda: bool(client.finishes))
    assert not await asyncio.to_thread(worker.drain, 0.1)
    if leaves:
        await client.close()
        channel.close()
    assert await asyncio.to_thread(worker.drain, PATIENCE_S)
    await client.close()
    channel.close()
    worker.stop()


def test_a_budget_that_is_too_small_names_both_numbers(checkpoint: Checkpoint) -> None:
    endpoint = MemoryNetwork().endpoint("w")
    small = replace(config(checkpoint.folder, Role.BOTH), kv_budget_bytes=1000)
    with pytest.raises(PoolTooSmall, match="1,000"):
        EngineThread(small, endpoint)
    stuck = replace(
        config(checkpoint.folder, Role.BOTH),
        max_running=1,
        chunk_tokens=4,
        kv_budget_bytes=150_000,
        expected_sequence_tokens=16,
        decode_release_interval_tokens=512,
    )
    with pytest.raises(PoolTooSmall, match="alone needs"):
        EngineThread(stuck, endpoint)


def damaged(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_budget_bytes": 1000}, r"engine.kv_budget_bytes is 1,000, .* below the [\d,]+ that"),
        ({"kv_budget_bytes": 1 << 60}, "bytes cannot be had: this host has"),
        ({"page_size": 1024}, r"engine.kv_budget_bytes is 4,194,304, too little for engine.page_size 1,024"),
        ({"decode_release_interval_tokens": 1 << 20}, "alone needs"),
        ({"device": "cuda:99"}, r"engine.device is 'cuda:99', torch sees \d+ CUDA"),
        ({"model_dir": Path("nowhere")}, "nowhere"),
        ({"model_dir": "damaged"}, "header"),
    ],
)
def test_settings_that_cannot_work_end_the_process_with_one_line(
    checkpoint: Checkpoint,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, object],
    message: str,
) -> None:
    if changes.get("model_dir") == "damaged":
        changes = {"model_dir": damaged(checkpoint.folder, tmp_path / "damaged")}
    wrong = replace(config(checkpoint.folder, Role.BOTH), **changes)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        run_worker(wrong, address=f"ipc://{tmp_path}/worker")
    assert ended.value.code == 2
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("worker worker-0 cannot start: ")
    assert re.search(message, line)
    assert "\n" not in line
