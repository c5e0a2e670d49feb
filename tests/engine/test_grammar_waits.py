"""An answer whose grammar is not compiled yet is not begun; nobody else waits for it."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd.token_table import TokenTable, load_token_table
from epd.types import FinishReason
from tests.engine.conftest import Checkpoint, MakeBench, make_request
from tests.engine.test_roles import make_pair
from tests.fakes.tiny_tokenizer import write_tokenizer

PROMPT = [(7 * i * i + 3 * i) % 120 for i in range(20)]
GRAMMAR = "start: /[ab]{2,3}/"
PATIENCE_S = 30.0


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint) -> Iterator[threading.Event]:
    """Grammars are compiled once it is set: the vocabulary they need is not read before."""
    go = threading.Event()
    if not (checkpoint.folder / "tokenizer.json").exists():
        write_tokenizer(checkpoint.folder)

    def load(folder: Path) -> TokenTable:
        assert go.wait(PATIENCE_S)
        return load_token_table(folder)

    monkeypatch.setattr("epd.engine.worker.load_token_table", load)
    yield go
    go.set()


def step_until(step: Callable[[], object], is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        step()


def test_one_worker(make_bench: MakeBench, compiles: threading.Event) -> None:
    bench = make_bench()
    bench.submit(make_request("shaped", PROMPT, grammar=GRAMMAR))
    bench.submit(make_request("free", PROMPT[::-1]))
    step_until(bench.step, lambda: "free" in bench.finishes)
    assert "shaped" not in bench.answers
    assert bench.engine.scheduler.num_waiting == 1
    compiles.set()
    step_until(bench.step, lambda: "shaped" in bench.finishes)
    assert bench.finishes["shaped"].reason is not FinishReason.FAILED
    bench.engine.loop.step()
    bench.assert_nothing_leased()


def test_two_workers(make_bench: MakeBench, compiles: threading.Event) -> None:
    """The prompt is computed by one that has the grammar; the other, which has not, goes on with others."""
    pair = make_pair(make_bench)
    compiles.set()
    shaped, free = make_request("shaped", PROMPT, grammar=GRAMMAR), make_request("free", PROMPT[::-1])
    grammars = pair.prefill.engine.scheduler
    pair.submit(shaped)
    step_until(pair.prefill.step, lambda: not grammars.num_waiting)
    compiles.clear()
    for _ in range(5):
        pair.prefill.step()
    pair.submit(free)

    def step() -> None:
        pair.prefill.step()
        pair.decode.step()

    step_until(step, lambda: "free" in pair.decode.finishes)
    assert "shaped" not in pair.decode.finishes
    compiles.set()
    step_until(step, lambda: "shaped" in pair.decode.finishes)
    assert pair.decode.finishes["shaped"].reason is not FinishReason.FAILED


def test_one_that_is_cancelled_meanwhile(make_bench: MakeBench, compiles: threading.Event) -> None:
    bench = make_bench()
    bench.submit(make_request("shaped", PROMPT, grammar=GRAMMAR))
    for _ in range(3):
        bench.step()
    bench.engine.scheduler.abort("shaped")
    step_until(bench.step, lambda: bench.engine.scheduler.is_idle)
    compiles.set()
    bench.submit(make_request("free", PROMPT))
    bench.run()
    assert bench.finishes["shaped"].reason is FinishReason.CANCELLED
    bench.assert_nothing_leased()
