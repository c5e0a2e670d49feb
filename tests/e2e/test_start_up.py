"""What `mimo serve` shows on a terminal: stages coming up, and one that cannot."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.models import cache_dir
from tests.cli.test_chat import Terminal
from tests.e2e.service import ROOT

pytestmark = pytest.mark.e2e
SERVE = [sys.executable, "-m", "cli", "serve", "--port", "0", "--set", "engine.kv_store="]


@contextmanager
def shown(*words: str) -> Iterator[Terminal]:
    # Kernels are compiled once per machine, not for this test.
    terminal = Terminal([*SERVE, *words], cache_dir(os.environ))
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.terminate()
            terminal.process.wait(60)
        os.close(terminal.master)


def test_a_table_then_a_request_that_can_be_pasted() -> None:
    with shown() as terminal:
        start = terminal.until("ready after", 200)
        assert not re.search(r"INFO epd|INFO encoder", start)
        assert start.count("✓ encoder-0") >= 1
        greeting = terminal.until("curl -N http://") + terminal.until("}'")
        assert "in a browser" in greeting
        terminal.type("\x03")
        terminal.until("stopping", 30)
        assert terminal.process.wait(60) == 0


def test_a_stage_that_refuses_its_settings() -> None:
    with shown("--set", "engine.device=cuda:63") as terminal:
        terminal.until("refused its settings or its checkpoint", 200)
        assert terminal.process.wait(60) == 2
        tail = terminal.seen[terminal.seen.rindex("\x1b[?25h") :]
        assert re.search(r"(prefill|decode)-0", tail)
        assert "encoder-0" not in tail


def test_events_for_machines(tmp_path: Path) -> None:
    command = [*SERVE, "--log-format", "json", "--set", "engine.device=cuda:63"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"event"')]
    assert done.returncode == 2
    assert {one["event"] for one in told} >= {"stage_started", "stage_exited", "failed"}
    assert told[-1]["exit_code"] == 2
