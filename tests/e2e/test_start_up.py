"""What `mimo serve` shows on a terminal: stages coming up, and one that cannot."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cli.models import cache_dir
from tests.cli.test_chat import Terminal

pytestmark = pytest.mark.e2e
SERVE = [sys.executable, "-m", "cli", "serve", "--mode", "e-pd", "--port", "0", "--set", "engine.kv_store="]


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
        terminal.until("stopped", 60)
        assert terminal.process.wait(60) == 0


def test_a_stage_that_refuses_its_settings() -> None:
    with shown("--set", "engine.device=cuda:63") as terminal:
        terminal.until("refused its settings or its checkpoint", 200)
        assert terminal.process.wait(60) == 2
        tail = terminal.seen[terminal.seen.rindex("\x1b[?25h") :]
        assert re.search("prefill-0", tail)
        assert "encoder-0" not in tail
