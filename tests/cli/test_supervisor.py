"""The supervisor on processes of its own making: real children, no models."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.load import SupervisorConfig
from cli.stage import GatewayStage
from cli.supervisor import StageEvent, StageFailed, Supervisor
from epd.config import GatewayConfig

FAST = SupervisorConfig(backoff_s=0.01, max_backoff_s=0.05, max_early_exits=3, drain_s=5.0)


def ends_and_starts(events: asyncio.Queue[StageEvent]) -> Callable[[StageEvent], None]:
    """Puts what becomes of processes; whether the watch has called one ready before that is a matter of moments."""
    return lambda event: None if event.what == "ready" else events.put_nowait(event)


class Script(Supervisor):
    """Runs a Python one-liner in place of a stage."""

    def __init__(self, code: str, runtime_dir: Path, on_event: Callable[[StageEvent], None]) -> None:
        stage = GatewayStage(config=GatewayConfig(model_dir=runtime_dir, model_name="none"))
        super().__init__([stage], runtime_dir=runtime_dir, config=FAST, on_event=on_event)
        self._code = code

    def _command(self, stage: object) -> list[str]:
        del stage
        import sys

        return [sys.executable, "-c", self._code]


async def test_a_killed_process_is_restarted_and_a_stop_is_final(tmp_path: Path) -> None:
    events: asyncio.Queue[StageEvent] = asyncio.Queue()
    supervisor = Script("import time; time.sleep(60)", tmp_path, ends_and_starts(events))
    await supervisor.start()
    pids = []
    for _ in range(3):
        event = await asyncio.wait_for(events.get(), 20)
        assert event.what == "started"
        pids.append(event.pid)
        os.kill(event.pid, signal.SIGKILL)
        ended = await asyncio.wait_for(events.get(), 20)
        assert (ended.what, ended.returncode) == ("exited", -signal.SIGKILL)
    last = await asyncio.wait_for(events.get(), 20)
    assert len({*pids, last.pid}) == 4
    await supervisor.stop()
    assert supervisor.pids == {}
    with pytest.raises(ProcessLookupError):
        os.kill(last.pid, 0)


@pytest.mark.parametrize(("code", "words"), [("exit(2)", "refused its settings"), ("exit(1)", "3 times")])
async def test_a_process_that_gives_up_by_itself_ends_the_deployment(tmp_path: Path, code: str, words: str) -> None:
    supervisor = Script(code, tmp_path, lambda event: None)
    await supervisor.start()
    with pytest.raises(StageFailed, match=words):
        await asyncio.wait_for(supervisor.failed(), 20)
    await supervisor.stop()


async def test_a_process_that_ignores_sigterm_is_killed_after_the_drain(tmp_path: Path) -> None:
    events: asyncio.Queue[StageEvent] = asyncio.Queue()
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    supervisor = Script(code, tmp_path, ends_and_starts(events))
    supervisor._config = SupervisorConfig(drain_s=0.3)
    await supervisor.start()
    await asyncio.wait_for(events.get(), 20)
    await asyncio.sleep(0.5)
    await supervisor.stop()
    ended = await asyncio.wait_for(events.get(), 20)
    assert ended.what == "exited"


async def test_settings_files_are_private(tmp_path: Path) -> None:
    supervisor = Script("import time; time.sleep(60)", tmp_path, lambda event: None)
    await supervisor.start()
    assert (tmp_path / "gateway.json").stat().st_mode & 0o077 == 0
    await supervisor.stop()


class EndedAtTheTimeout:
    """A process whose end is seen only after the wait for it has run out; what asyncio says of it then has no text."""

    pid = 1
    returncode: int | None = None

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.returncode = 0
        raise ProcessLookupError

    async def wait(self) -> int:
        if self.returncode is None:
            await asyncio.sleep(60)
        return 0


async def test_a_process_that_ends_at_the_timeout_is_no_fault(tmp_path: Path) -> None:
    supervisor = Script("", tmp_path, lambda event: None)
    supervisor._config = SupervisorConfig(drain_s=0.01)
    ended = EndedAtTheTimeout()
    supervisor._processes[supervisor._stages[0].name] = ended  # type: ignore[assignment]
    await supervisor.stop()
    assert ended.returncode == 0
