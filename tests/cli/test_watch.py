"""Who is silent for too long, and who is not to blame."""

import asyncio
from pathlib import Path

import pytest
import zmq.asyncio

from cli.load import SupervisorConfig
from cli.runtime import run_directory, sweep
from cli.stage import FrontStage, WorkerStage
from cli.watch import Watch
from encoder import FrontConfig, SglangConfig
from encoder.wire import Codec
from epd.config import EngineConfig, GatewayConfig
from epd.types import Hello, Role, ToWorker


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def silent() -> list[str]:
    return []


@pytest.fixture
def watch(clock: Clock, silent: list[str]) -> Watch:
    config = SupervisorConfig(silence_s=10.0)
    return Watch([], config, on_silence=lambda name, _: silent.append(name), clock=clock)


def test_a_stage_that_stops_answering_is_reported_once(watch: Watch, clock: Clock, silent: list[str]) -> None:
    watch.heard("decode-0")
    watch.heard("prefill-0")
    clock.now_s = 9.0
    watch.heard("prefill-0")
    clock.now_s = 11.0
    watch.look()
    watch.look()
    assert silent == ["decode-0"]


def test_a_stage_that_loads_is_given_its_time(watch: Watch, clock: Clock, silent: list[str]) -> None:
    watch.heard("decode-0")
    watch.started("decode-0")
    clock.now_s = 1000.0
    watch.look()
    assert silent == []


async def test_probes_speak_the_protocol_and_any_answer_counts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/worker"
    config = EngineConfig(model_dir=tmp_path, model_name="none", role=Role.BOTH, name="worker-0")
    stage = WorkerStage(config=config, address=address)
    heard = asyncio.Event()

    class Listener(Watch):
        def heard(self, name: str) -> None:
            assert name == "worker-0"
            heard.set()

    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    watch = Listener([stage], SupervisorConfig(probe_period_s=0.05), on_silence=lambda name, _: None)
    task = asyncio.create_task(watch.run())
    peer, *frames = await asyncio.wait_for(router.recv_multipart(), 10)
    message, _ = Codec[ToWorker](ToWorker).decode(frames)
    assert message == Hello(sequence=0)
    assert not heard.is_set()
    await router.send_multipart([peer, b"anything"])
    await asyncio.wait_for(heard.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)


def test_a_killed_run_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "mimo-dead"
    dead.mkdir()
    (dead / "supervisor.lock").touch()
    (dead / "gateway.json").touch()
    unrelated = tmp_path / "mimo-notes"
    unrelated.mkdir()
    with run_directory(tmp_path) as living:
        assert not dead.exists()
        assert sweep(tmp_path) == []
        assert living.is_dir()
        assert unrelated.is_dir()
    assert not living.exists()


async def test_of_a_front_the_loop_that_works_is_asked(tmp_path: Path) -> None:
    """Its health is answered by a thread of its own, which would hide that the rest hangs."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1])
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    stage = FrontStage(config=FrontConfig(model_dir=tmp_path, model_name="m", port=port), sglang=SglangConfig())
    watch = Watch([stage], SupervisorConfig(probe_period_s=0.05), on_silence=lambda name, _: None)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(20):
        while not watch._heard_s:  # noqa: ASYNC110 - another task's state
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    listening.close()
    assert set(asked) == {"/v1/models"}


def test_who_waits_for_a_hung_stage_waits_until_it_is_replaced() -> None:
    """It is given up as lost first, and then waited for: longer together than until it is killed, and started."""
    gateway, start_s = GatewayConfig(model_dir=Path(), model_name=""), 10.0
    waits_s = gateway.worker_timeout_s + gateway.restart_wait_s
    assert waits_s >= SupervisorConfig().silence_s + start_s
