"""A deployment for a block: stopped at its end, and ended early when it cannot go on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli import service as module
from cli.load import ServeConfig, load
from cli.service import service
from cli.supervisor import StageFailed


class Deployment:
    """A supervisor without processes. `fails` sets off what a stage beyond restarting does."""

    def __init__(self, stages: Any, **_: Any) -> None:
        self.fails = asyncio.Event()
        self.stopped = False

    async def start(self) -> None:
        pass

    async def failed(self) -> None:
        await self.fails.wait()
        raise StageFailed("decode-0 exited by itself")

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    made: list[Deployment] = []

    def make(*arguments: Any, **settings: Any) -> Deployment:
        made.append(Deployment(*arguments, **settings))
        return made[0]

    async def at_once(config: ServeConfig) -> None:
        pass

    monkeypatch.setattr(module, "Supervisor", make)
    monkeypatch.setattr(module, "until_ready", at_once)
    return made


async def test_the_service_is_stopped_at_the_end(started: list[Deployment], tmp_path: Path) -> None:
    async with service(load(runtime_dir=tmp_path, environ={})) as url:
        assert url == "http://127.0.0.1:8000"
        assert not started[0].stopped
    assert started[0].stopped


async def test_a_stage_beyond_restarting_ends_the_block(started: list[Deployment], tmp_path: Path) -> None:
    async def use() -> None:
        async with service(load(runtime_dir=tmp_path, environ={})):
            started[0].fails.set()
            await asyncio.sleep(30)

    with pytest.raises(StageFailed, match="decode-0"):
        await use()
    assert started[0].stopped
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_interruption_stays_one(started: list[Deployment], tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def use() -> None:
        async with service(load(runtime_dir=tmp_path, environ={})):
            entered.set()
            await asyncio.sleep(30)

    using = asyncio.create_task(use())
    await entered.wait()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert started[0].stopped
