"""Several processes on one arena, one of which is killed at any instruction: nothing leaks, nothing is torn."""

import contextlib
import multiprocessing
import random
import time
import uuid
from collections.abc import Iterator

import pytest

from encoder.cache.arena import SHM_DIR, remove_arena
from encoder.cache.index import create_arena
from encoder.cache.store import EmbeddingStore
from preprocess.types import MediaKey
from tests.fakes.arena_hammer import NUM_KEYS, ROWS, content_of, hammer

NUM_PAGES, PAGE_BYTES = 64, 128


@pytest.fixture
def arena() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    create_arena(name, size_bytes=NUM_PAGES * PAGE_BYTES, page_bytes=PAGE_BYTES)
    yield name
    remove_arena(name)
    assert list(SHM_DIR.glob(f"{name}*")) == []


class Hammer:
    """One such process; at work once `wait_up` returns."""

    def __init__(self, arena: str, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.fakes.arena_hammer"])
        self._up, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=hammer, args=(arena, f"h{number}", number, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait_up(self) -> None:
        if not self._up.closed:
            self._up.recv()
            self._up.close()

    def kill(self) -> None:
        self._up.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def test_killed_at_any_moment(arena: str) -> None:
    source = random.Random(7)
    store = EmbeddingStore(arena, holder="watcher", rows=ROWS)
    hammers = [Hammer(arena, number) for number in range(3)]
    try:
        for number in range(3, 43):
            for living in hammers:
                living.wait_up()
            time.sleep(source.uniform(0.0, 0.03))
            hammers.pop(0).kill()
            check_all(store)
            assert all(living.process.is_alive() for living in hammers), "the others noticed"
            hammers.append(Hammer(arena, number))
    finally:
        for living in hammers:
            living.kill()
    store.tidy()
    store.expire(time.time() + 120)
    check_all(store)
    usage = store.usage()
    assert (usage.reserved_bytes, usage.leased_bytes, store.num_leases) == (0, 0, 0)
    assert len(store) > 0
    whole = store.reserve(MediaKey("whole"), NUM_PAGES * PAGE_BYTES // ROWS.row_bytes)
    store.abandon(whole)
    assert store.usage().free_bytes == NUM_PAGES * PAGE_BYTES
    store.close()


def check_all(store: EmbeddingStore) -> None:
    """While others are at work: the books balance, and what is published has the right bytes or is gone."""
    store.check()
    for number in range(NUM_KEYS):
        with contextlib.suppress(KeyError):
            assert store.content(MediaKey(f"key-{number}")) == content_of(number)
