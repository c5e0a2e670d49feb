"""Working memory: the same again, never shared by two calls at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from preprocess import scratch as module
from preprocess.scratch import Scratch, scratch


@pytest.fixture(autouse=True)
def _none_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_free", [])


def test_a_name_has_the_same_memory_until_more_is_needed() -> None:
    memory = Scratch()
    first = memory.array("rows", (3, 4), np.float32)
    first[...] = 7
    second = memory.array("rows", (2, 5), np.float32)
    assert second.shape == (2, 5)
    assert (second == 7).all()
    assert np.shares_memory(first, second)
    assert not np.shares_memory(first, memory.array("other", (3, 4), np.uint32))
    assert not np.shares_memory(first, memory.array("rows", (5, 5), np.int32))
    assert memory.size_bytes == 4 * (25 + 12)


def test_calls_after_each_other_use_one_and_calls_inside_each_other_two() -> None:
    with scratch() as first, scratch() as second:
        assert first is not second
    with scratch() as third:
        assert third in (first, second)


def test_very_large_ones_are_given_up() -> None:
    with scratch() as memory:
        memory.array("rows", (9 * 1024 * 1024,), np.float32)
    with scratch() as other:
        assert other is not memory


def test_given_back_when_the_call_fails() -> None:
    with pytest.raises(KeyError), scratch() as memory:
        raise KeyError("anything")
    with scratch() as again:
        assert again is memory


def test_threads_never_hold_the_same() -> None:
    held: list[Scratch] = []
    start = threading.Barrier(8)
    faults: list[str] = []

    def use() -> None:
        start.wait()
        for _ in range(200):
            with scratch() as memory:
                if any(memory is other for other in held):
                    faults.append("held twice")
                held.append(memory)
                held.remove(memory)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(module._free) <= 8
