"""What is shown while stages come up: a table on a terminal, lines elsewhere, JSON for machines."""

import asyncio
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from cli.startup import JsonView, LiveView, PlainView, startup_view
from cli.supervisor import StageEvent, StageFailed, StageRefused
from tests.cli.test_supervisor import Script

STAGES = ("encoder-0", "decode-0")


class Clock:
    """Seconds as the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def terminal() -> tuple[Console, io.StringIO]:
    said = io.StringIO()
    return Console(file=said, force_terminal=True, width=120, highlight=False, color_system=None), said


def rows(view: LiveView) -> list[str]:
    said = io.StringIO()
    Console(file=said, width=120).print(view.table())
    return [" ".join(line.split()) for line in said.getvalue().splitlines()]


def live(tmp_path: Path) -> tuple[LiveView, Clock, io.StringIO]:
    console, said = terminal()
    clock = Clock()
    return LiveView(console, STAGES, clock=clock, proc=tmp_path), clock, said


def test_a_line_per_stage_from_waiting_to_ready(tmp_path: Path) -> None:
    view, clock, said = live(tmp_path)
    assert rows(view) == ["· encoder-0 waiting", "· decode-0 waiting"]
    view.start()
    view.event(StageEvent("decode-0", "started", 7))
    clock.now_s += 2.5
    view.log("decode-0", "2026-01-01 10:00:00,000 decode-0 INFO epd.engine.worker: loading weights")
    assert rows(view)[1] == "… decode-0 starting 2.5 s loading weights"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text(f"900000 {3 << 18} 1 1 0 1 0")
    assert rows(view)[1] == "… decode-0 starting 2.5 s 3.0 GiB in memory, loading weights"
    view.event(StageEvent("decode-0", "ready", 7))
    clock.now_s += 5
    assert rows(view)[1] == "✓ decode-0 ready 2.5 s"
    view.event(StageEvent("encoder-0", "started", 8))
    view.ready(7.5, "http://x")
    text = said.getvalue()
    assert "ready after 7.5 s" in text
    # The cursor is shown again, and nothing moves any more.
    assert text.rindex("\x1b[?25h") < text.index("ready after")
    view.close()


@pytest.mark.parametrize("width", [100, 80, 60])
def test_where_there_is_little_room_only_what_a_stage_says_is_cut(tmp_path: Path, width: int) -> None:
    view, clock, _ = live(tmp_path)
    view.event(StageEvent("decode-0", "started", 7))
    clock.now_s += 123.4
    address = "ipc:///tmp/mimo-run-0123456789abcdef/" + "decode-0" * 20
    view.log("decode-0", f"2026-01-01 10:00:00,000 decode-0 INFO epd.engine.worker: listens at {address}")
    said = io.StringIO()
    Console(file=said, width=width).print(view.table())
    first, second = said.getvalue().splitlines()
    assert first.split() == ["·", "encoder-0", "waiting"]
    assert " ".join(second.split()).startswith("… decode-0 starting 123.4 s listens at ipc:///tmp")
    assert len(second.rstrip()) <= width
    assert second.rstrip().endswith("…")


@pytest.mark.parametrize("code", [0, -15])
def test_what_is_told_to_stop_is_no_fault(code: int) -> None:
    said = io.StringIO()
    view = PlainView(Console(file=said, width=120))
    view.event(StageEvent("gateway", "exited", 7, code, was_told=True))
    view.stopped()
    assert said.getvalue() == "stopped\n"
    view.event(StageEvent("gateway", "exited", 7, -9, was_told=True))
    view.event(StageEvent("gateway", "exited", 7, 3))
    lines = [" ".join(line.split()) for line in said.getvalue().splitlines()[1:]]
    assert lines == ["gateway pid 7 killed by SIGKILL", "gateway pid 7 ended with exit code 3"]


def test_warnings_are_seen_above_the_table_and_control_characters_are_not_obeyed(tmp_path: Path) -> None:
    view, _, said = live(tmp_path)
    view.start()
    view.log("decode-0", "2026-01-01 10:00:00,000 decode-0 WARNING epd.x: no room \x1b]0;title\x07")
    view.log("decode-0", "2026-01-01 10:00:00,000 decode-0 INFO epd.x: all is well")
    view.close()
    assert "WARNING epd.x: no room" in said.getvalue()
    assert "\x1b]0" not in said.getvalue()


def test_after_the_start_logs_run_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view, _, said = live(tmp_path)
    view.start()
    view.log("decode-0", "before")
    view.ready(1.0, "http://x")
    view.log("decode-0", "after")
    view.event(StageEvent("decode-0", "exited", 7, -9))
    view.event(StageEvent("decode-0", "ready", 9))
    assert capsys.readouterr().err == "after\n"
    assert said.getvalue().endswith("decode-0     pid 7 killed by SIGKILL\n")


def test_a_failure_is_the_last_lines_of_that_stage_and_the_reason(tmp_path: Path) -> None:
    view, _, said = live(tmp_path)
    view.start()
    for index in range(100):
        view.log("decode-0", f"decode line {index}")
        view.log("encoder-0", f"encoder line {index}")
    view.event(StageEvent("encoder-0", "ready", 5))
    at = len(said.getvalue())
    view.failed(StageRefused("decode-0 refused its settings", stage="decode-0"))
    text = said.getvalue()[at:]
    assert re.findall(r"line (\d+)", text)[-1] == "99"
    assert "decode line 88" in text
    assert "decode line 87" not in text
    assert "encoder line" not in text
    assert text.endswith("mimo serve: decode-0 refused its settings\n")


def test_of_a_deployment_that_is_late_those_that_are_not_ready_are_told(tmp_path: Path) -> None:
    view, _, said = live(tmp_path)
    view.start()
    view.log("encoder-0", "encoder line")
    view.log("decode-0", "decode line")
    view.event(StageEvent("encoder-0", "ready", 5))
    view.failed(StageFailed("not ready after 300 s"))
    assert "decode line" in said.getvalue()
    assert "encoder line" not in said.getvalue()


def test_without_a_terminal_lines_are_plain() -> None:
    said = io.StringIO()
    view = startup_view(Console(file=said, width=120), STAGES)
    assert type(view) is PlainView
    assert not view.captures_logs
    view.start()
    view.event(StageEvent("decode-0", "started", 7))
    view.event(StageEvent("decode-0", "ready", 7))
    view.event(StageEvent("decode-0", "exited", 7, 0))
    view.ready(3.25, "http://x")
    view.close()
    assert said.getvalue() == "  decode-0     pid 7\nready after 3.2 s\n"


def test_for_machines_an_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    console, said = terminal()
    view = startup_view(console, STAGES, "json")
    assert isinstance(view, JsonView)
    view.event(StageEvent("decode-0", "started", 7))
    view.event(StageEvent("decode-0", "exited", 7, 2))
    view.event(StageEvent("decode-0", "silent", 8, silent_s=31.0))
    view.ready(3.25, "http://127.0.0.1:8000")
    view.stopping(30)
    view.event(StageEvent("encoder-0", "exited", 6, -15, was_told=True))
    view.stopped()
    view.failed(StageRefused("no", stage="decode-0"))
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert said.getvalue() == ""
    assert [one["event"] for one in told] == [
        *("stage_started", "stage_exited", "stage_silent", "ready", "stopping", "stage_exited", "stopped", "failed")
    ]
    assert (told[1]["returncode"], told[2]["silent_s"], told[3]["url"]) == (2, 31.0, "http://127.0.0.1:8000")
    assert (told[7]["stage"], told[7]["exit_code"], told[7]["message"]) == ("decode-0", 2, "no")
    assert all({"time", "level", "process", "message"} <= one.keys() for one in told)
    assert [one["level"] for one in told] == [*("info", "warning", "warning", "info", "info", "info", "info", "error")]
    assert "for 30 s at most" in told[4]["message"]
    assert [told[1]["message"], told[5]["message"], told[6]["message"]] == [
        "decode-0: pid 7 ended with exit code 2",
        "encoder-0: pid 6 stopped",
        "stopped",
    ]
    killed = json.loads(view.line_at_once(15, 4))
    assert (killed["event"], killed["exit_code"], killed["process"]) == ("killed", 143, "supervisor")


async def test_the_supervisor_hands_on_what_its_processes_write(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    code = "import sys; print('x' * 200_000); print('out'); sys.stderr.write('last words'); sys.exit(2)"
    supervisor = Script(code, tmp_path, lambda event: None)
    supervisor._on_log = lambda name, line: lines.append((name, line))
    await supervisor.start()
    with pytest.raises(StageRefused) as refused:
        await asyncio.wait_for(supervisor.failed(), 20)
    await supervisor.stop()
    assert refused.value.stage == "gateway"
    assert next(len(line) for _, line in lines) == 200_000
    assert {line for _, line in lines[1:]} == {"out", "last words"}
