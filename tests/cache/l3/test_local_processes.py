"""Several processes on one local store, some of them killed wherever they happen to be."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.store_calls import StoreCalls
from tests.fakes.store_hammer import key_of, open_client, value_of

ROOT = Path(__file__).parents[3]
LARGE = 256 << 20


class Workers:
    """Processes of tests.fakes.store_hammer."""

    def __init__(self, root: Path, *, memory_bytes: int, disk_bytes: int = LARGE) -> None:
        self.root = root
        self.bounds = (memory_bytes, disk_bytes)
        self._lives = 0

    def start(self, worker: int, mode: str, seconds: float) -> subprocess.Popen[str]:
        self._lives += 1
        words = [str(self.root), str(worker), mode, str(seconds), *map(str, self.bounds), str(self._lives)]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.store_hammer", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def noted(self) -> list[bytes]:
        """Keys that somebody was told are kept."""
        return [key for path in self.root.glob("notes-*") for key in path.read_bytes().split(b"\n") if len(key) == 17]

    def open(self) -> StoreCalls:
        return StoreCalls(open_client(self.root, *self.bounds))


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()


def ended(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_no_completed_put_is_lost_when_writers_are_killed(tmp_path: Path) -> None:
    """Two of them write, demote and adopt each other's segments; each is killed again and again at a random moment."""
    workers = Workers(tmp_path, memory_bytes=8 << 17)
    rng = random.Random(1)
    for _ in range(5):
        processes = [workers.start(worker, "put", 60) for worker in (1, 2)]
        for process in processes:
            ready(process)
        time.sleep(rng.uniform(0.01, 0.25))
        for process in processes:
            process.kill()
            process.communicate()
    noted = workers.noted()
    assert len(noted) > 100
    for _ in range(2):
        calls = workers.open()
        for start in range(0, len(noted), 100):
            keys = noted[start : start + 100]
            values = calls.get({key: len(value_of(key)) for key in keys})
            assert values == {key: value_of(key) for key in keys}
        stats = calls.client.stats()
        assert (stats.misses, stats.corrupt, stats.failures) == (0, 0, 0)
        calls.client.close()
    # What was never completed is right, too, or not there.
    calls = workers.open()
    keys = [key_of(worker, number) for worker in (1, 2) for number in range(0, 9000, 7)]
    for key, value in calls.get({key: len(value_of(key)) for key in keys}).items():
        assert value in (None, value_of(key))
    assert calls.client.stats().corrupt == 0
    calls.client.close()
    assert not list((tmp_path / "hot").glob(".new-*"))


@pytest.mark.parametrize("memory_segments", [6, 64])
def test_many_at_once_while_things_are_evicted_and_some_are_killed(tmp_path: Path, memory_segments: int) -> None:
    """All of them overwrite, discard and read the same keys; nobody ever reads what nobody put."""
    workers = Workers(tmp_path, memory_bytes=memory_segments << 17, disk_bytes=8 << 17)
    processes = [workers.start(worker, "mixed", 1.2) for worker in range(3)]
    doomed = workers.start(3, "mixed", 60)
    for process in (*processes, doomed):
        ready(process)
    time.sleep(0.4)
    doomed.kill()
    doomed.communicate()
    for process in processes:
        ended(process)
    hot_bytes = sum(path.stat().st_size for path in (tmp_path / "hot").glob("*.seg"))
    cold_bytes = sum(path.stat().st_size for path in (tmp_path / "cold").glob("*.seg"))
    assert hot_bytes <= memory_segments << 17
    assert cold_bytes <= 8 << 17
    calls = workers.open()
    keys = [key_of(0, number) for number in range(200)]
    assert any(calls.exists(keys))
    for key, value in calls.get({key: len(value_of(key)) for key in keys}).items():
        assert value is None or value in [value_of(key, seed) for seed in range(3)]
    calls.client.close()


def test_one_sees_what_another_has_put_at_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path, memory_bytes=64 << 17)
    calls = workers.open()
    process = workers.start(1, "put", 0.6)
    ready(process)
    seen = 0
    while process.poll() is None or seen < len(workers.noted()):
        keys = workers.noted()[seen:]
        values = calls.get({key: len(value_of(key)) for key in keys})
        assert values == {key: value_of(key) for key in keys}
        seen += len(keys)
    ended(process)
    assert seen > 20
    calls.client.close()


def test_death_in_the_middle_of_any_system_call(tmp_path: Path) -> None:
    """What was completed before is there, what was under way is as before or done, and the next process can go on."""
    words = [sys.executable, "-m", "tests.fakes.store_crash", str(tmp_path), "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80
