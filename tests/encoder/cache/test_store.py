"""The embedding cache: one store's promises, several stores on one arena against the plain one, and many processes."""

import contextlib
import os
import sqlite3
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from encoder.cache.arena import SHM_DIR, attach, checksum, index_path, remove_arena
from encoder.cache.holder import Process
from encoder.cache.index import RowFormat, create_arena
from encoder.cache.report import clear_arena
from encoder.cache.store import EmbeddingStore, Reservation
from encoder.errors import ArenaFull, ArenaLocked, ArenaUnavailable, EmbeddingLost, EmbeddingTooLarge
from encoder.types import EmbeddingRef
from preprocess.types import MediaKey, MediaLayout, Modality
from tests.oracles.memory_arena import MemoryArena

ROW_BYTES = 64
PAGE_BYTES = 128
NUM_PAGES = 24
ROWS = RowFormat(16, "float32", ROW_BYTES)


def layout_of(num_rows: int) -> MediaLayout:
    return MediaLayout(modality=Modality.AUDIO, num_audio_rows=num_rows)


def fill(key: str, num_rows: int) -> bytes:
    return key.encode().ljust(8, b".") * (num_rows * ROW_BYTES // 8)


def put(store: EmbeddingStore, key: str, num_rows: int, warnings: tuple[str, ...] = ()) -> bool:
    reservation = store.reserve(MediaKey(key), num_rows)
    content = fill(key, num_rows)
    reservation.destination[:] = content
    return store.publish(reservation, layout=layout_of(num_rows), checksum=checksum(content), warnings=warnings)


@pytest.fixture
def arena() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    create_arena(name, size_bytes=NUM_PAGES * PAGE_BYTES, page_bytes=PAGE_BYTES)
    yield name
    remove_arena(name)
    assert list(SHM_DIR.glob(f"{name}*")) == []


@pytest.fixture
def store(arena: str) -> Iterator[EmbeddingStore]:
    with opened(arena, "inc") as made:
        yield made
        made.check()


@pytest.fixture
def other(arena: str) -> Iterator[EmbeddingStore]:
    with opened(arena, "oth") as made:
        yield made


@contextlib.contextmanager
def opened(arena: str, holder: str) -> Iterator[EmbeddingStore]:
    with contextlib.closing(EmbeddingStore(arena, holder=holder, rows=ROWS)) as made:
        yield made


def test_publish_then_lease_gives_the_bytes(store: EmbeddingStore) -> None:
    assert put(store, "a", 3, ("mended",))
    ref = store.lease(MediaKey("a"), owner="me", expires_s=10.0)
    segment = attach(ref.arena)
    content = segment[ref.offset_bytes : ref.offset_bytes + ref.num_rows * ROW_BYTES]
    assert content == fill("a", 3)
    assert checksum(content) == ref.checksum
    assert store.content(MediaKey("a")) == store.leased_content(ref) == content
    entry = store.lookup(MediaKey("a"))
    assert entry is not None
    assert (entry.layout, entry.warnings, entry.num_leases) == (layout_of(3), ("mended",), 1)


def test_least_recently_released_goes_first(store: EmbeddingStore, other: EmbeddingStore) -> None:
    for key in "abc":
        put(store, key, 16)  # 8 pages each, the arena is full
    lease = other.lease(MediaKey("a"), owner="me", expires_s=10.0)
    store.release(lease.lease_id)
    put(other, "d", 16)
    assert [key for key in "abcd" if store.lookup(MediaKey(key))] == ["a", "c", "d"]


def test_leases_block_eviction_and_expire(store: EmbeddingStore, other: EmbeddingStore) -> None:
    for key in "abc":
        put(store, key, 16)
        store.lease(MediaKey(key), owner=f"peer-{key}", expires_s=ord(key))
    with pytest.raises(ArenaFull) as caught:
        other.reserve(MediaKey("d"), 1)
    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    assert other.expire(ord("a") - 1) == 0
    assert other.expire(ord("a")) == 1
    assert other.release_owner("peer-b") == 0, "its own peer of that name is somebody else"
    assert store.release_owner("peer-b") == 1
    put(other, "d", 32)
    assert store.lookup(MediaKey("c")) is not None


def test_an_owner_keeps_only_what_it_says_whoever_gave_it(store: EmbeddingStore, other: EmbeddingStore) -> None:
    for key in "abc":
        put(store, key, 16)
    held = [at.lease(MediaKey(key), owner="me", expires_s=10.0) for key, at in [("a", store), ("a", other)]]
    lost = [at.lease(MediaKey(key), owner="me", expires_s=10.0) for key, at in [("a", other), ("b", store)]]
    foreign = store.lease(MediaKey("c"), owner="you", expires_s=10.0)
    assert other.keep_only("me", {ref.lease_id for ref in held} | {"oth:77", "nonsense"}) == 2
    assert other.keep_only("me", {ref.lease_id for ref in held}) == 0
    put(other, "d", 16)
    assert [key for key in "abcd" if store.lookup(MediaKey(key))] == ["a", "c", "d"]
    assert [store.release(ref.lease_id) for ref in (*held, *lost, foreign)] == [True, True, False, False, True]
    assert other.keep_only("me", ()) == 0


def test_what_never_fits_is_refused_for_good(store: EmbeddingStore) -> None:
    with pytest.raises(EmbeddingTooLarge) as caught:
        store.reserve(MediaKey("a"), NUM_PAGES * PAGE_BYTES // ROW_BYTES + 1)
    assert caught.value.status == 413


def test_first_published_value_stays(store: EmbeddingStore, other: EmbeddingStore) -> None:
    late = other.reserve(MediaKey("a"), 2)
    late.destination[:] = fill("late", 2)
    assert put(store, "a", 1)
    free_bytes = store.usage().free_bytes
    assert not other.publish(late, layout=layout_of(2), checksum=0)
    assert store.usage().free_bytes == free_bytes + PAGE_BYTES, "the second one's room is given back"
    assert other.content(MediaKey("a")) == fill("a", 1)


def test_a_lease_is_ended_through_any_store(store: EmbeddingStore, other: EmbeddingStore) -> None:
    put(store, "a", 1)
    ref = store.lease(MediaKey("a"), owner="me", expires_s=1.0)
    assert not other.release(ref.lease_id.replace("inc", "old")), "ids of an earlier process mean nothing"
    for nonsense in ("", "inc", "inc:", "inc:x", "inc:-1", f"inc:{'9' * 30}"):
        assert not other.release(nonsense)
    assert other.release(ref.lease_id)
    assert not store.release(ref.lease_id)


def test_together_is_all_or_nothing(store: EmbeddingStore, other: EmbeddingStore) -> None:
    reservation = store.reserve(MediaKey("a"), 1)
    usage = store.usage()

    def publish_and_fail() -> None:
        with store.together():
            store.publish(reservation, layout=layout_of(1), checksum=0)
            store.lease(MediaKey("nobody"), owner="me", expires_s=1.0)

    with pytest.raises(KeyError):
        publish_and_fail()
    assert other.lookup(MediaKey("a")) is None
    assert store.usage() == usage
    store.abandon(reservation)
    assert store.usage().free_bytes == NUM_PAGES * PAGE_BYTES


def test_transactions_of_two_stores_never_overlap(store: EmbeddingStore, other: EmbeddingStore) -> None:
    with store.together():
        with pytest.raises(ArenaLocked):
            other.tidy()
        assert store.lookup(MediaKey("a")) is None
    other.tidy()


def test_content_that_another_began_to_overwrite_is_gone(store: EmbeddingStore) -> None:
    put(store, "a", 2)
    entry = store.lookup(MediaKey("a"))
    assert entry is not None
    store._segment.view(entry.extent, 1)[:] = b"!"
    with pytest.raises(KeyError):
        store.content(MediaKey("a"))


def test_room_of_a_dead_process_is_reclaimed_and_its_rows_stay(arena: str) -> None:
    alive = {Process(1, 1), Process(2, 2)}
    first, second = (
        EmbeddingStore(arena, holder=f"h{who.pid}", rows=ROWS, process=who, lives=alive.__contains__)
        for who in sorted(alive, key=lambda who: who.pid)
    )
    put(first, "kept", 2)
    ref = first.lease(MediaKey("kept"), owner="me", expires_s=1.0)
    lost = first.reserve(MediaKey("lost"), 40)
    second.tidy()
    with pytest.raises(ArenaFull):
        second.reserve(MediaKey("b"), 8)
    alive.remove(Process(1, 1))
    second.abandon(second.reserve(MediaKey("b"), 8))
    assert second.content(MediaKey("kept")) == fill("kept", 2)
    assert second.release(ref.lease_id)
    with pytest.raises(EmbeddingLost):
        first.publish(lost, layout=layout_of(40), checksum=0)
    first.abandon(lost)
    second.check()
    first.close()
    second.close()


def test_a_live_process_is_told_from_a_later_one_with_its_number() -> None:
    me = Process.current()
    assert me.is_alive
    assert not Process(me.pid, me.started_ticks - 1).is_alive
    assert not Process(2**22 + 1, 1).is_alive


def test_a_process_that_ended_is_dead_before_its_parent_waits() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = Process.of(child.pid)
        assert found is not None
        assert found.is_alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not found.is_alive
    assert Process.of(child.pid) is None


def test_a_locked_arena_is_busy_soon_and_nothing_is_lost(store: EmbeddingStore, arena: str) -> None:
    put(store, "a", 1)
    lease = store.lease(MediaKey("a"), owner="me", expires_s=10.0)
    reservation = store.reserve(MediaKey("b"), 1)
    with contextlib.closing(sqlite3.connect(index_path(arena), isolation_level=None)) as stopped:
        stopped.execute("BEGIN IMMEDIATE")
        assert store.locked_s == 0.0
        with pytest.raises(ArenaLocked):
            store.reserve(MediaKey("c"), 1)
        assert store.lookup(MediaKey("a")) is not None, "reading goes on"
        assert store.locked_s > 0.0, "which proves nothing"
        started_s = time.monotonic()
        for _ in range(100):
            assert not store.release("other:1")
            with pytest.raises(ArenaLocked):
                store.expire(20.0)
        assert time.monotonic() - started_s < 0.25, "after the first nobody stands still"
        assert not store.release(lease.lease_id)
        store.abandon(reservation)
        stopped.execute("ROLLBACK")
    store.tidy()
    assert store.locked_s == 0.0
    assert store.num_leases == 0
    assert store.usage().reserved_bytes == 0


def test_what_was_put_off_is_done_before_the_end(store: EmbeddingStore, arena: str) -> None:
    put(store, "a", 1)
    with opened(arena, "leaving") as leaving:
        lease = leaving.lease(MediaKey("a"), owner="me", expires_s=10.0)
        stopped = sqlite3.connect(index_path(arena), isolation_level=None, check_same_thread=False)
        stopped.execute("BEGIN IMMEDIATE")
        assert not leaving.release(lease.lease_id)
        resumed = threading.Timer(0.1, stopped.close)
        resumed.start()
    resumed.join()
    assert store.num_leases == 0
    store.check()


def test_an_arena_of_other_rows_or_another_version_is_refused(store: EmbeddingStore, arena: str) -> None:
    for rows in (RowFormat(16, "bfloat16", 32), RowFormat(32, "float32", 128)):
        with pytest.raises(ArenaUnavailable, match="rows of 16 float32"):
            EmbeddingStore(arena, holder="x", rows=rows)
    with contextlib.closing(sqlite3.connect(index_path(arena))) as database, database:
        database.execute("UPDATE arena SET version = 0")
    with pytest.raises(ArenaUnavailable, match="version 0"):
        EmbeddingStore(arena, holder="x", rows=ROWS)


def test_an_old_sqlite_is_named(arena: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ArenaUnavailable, match=r"needs 3\.35"):
        EmbeddingStore(arena, holder="x", rows=ROWS)


def test_what_is_no_arena_is_refused(arena: str) -> None:
    with pytest.raises(ArenaUnavailable, match="cannot be opened"):
        EmbeddingStore("test-none", holder="x", rows=ROWS)
    index_path(arena).write_bytes(b"something else" * 1000)
    with pytest.raises(ArenaUnavailable):
        EmbeddingStore(arena, holder="x", rows=ROWS)


def test_counts_of_all_processes_are_added_up(arena: str, store: EmbeddingStore) -> None:
    with opened(arena, "gone") as gone:
        gone.count(hits=2, misses=1)
        gone.tidy()
    store.count(hits=1)
    store.tidy()
    with contextlib.closing(sqlite3.connect(index_path(arena))) as database:
        assert database.execute("SELECT hits, misses FROM arena").fetchall() == [(2, 1)]
        assert database.execute("SELECT id, hits FROM holders").fetchall() == [("inc", 1)]


class StoreMachine(RuleBasedStateMachine):
    """Three stores on one arena, any of which dies now and then, do what the plain arena does."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = f"test-{uuid.uuid4().hex}"
        create_arena(self.arena, size_bytes=NUM_PAGES * PAGE_BYTES, page_bytes=PAGE_BYTES)
        self.truth = MemoryArena(NUM_PAGES)
        self.now_s = 0.0
        self.num_opened = 0
        self.alive: set[Process] = set()
        self.stores: list[EmbeddingStore] = []
        self.names: list[str] = []
        self.reserved: list[tuple[int, str, Reservation, int, int]] = []
        self.refs: dict[int, tuple[EmbeddingRef, float]] = {}

    @initialize()
    def open_all(self) -> None:
        for _ in range(3):
            self.stores.append(self.opened())
            self.names.append(f"h{self.num_opened}")

    def opened(self) -> EmbeddingStore:
        self.num_opened += 1
        process = Process(self.num_opened, 0)
        self.alive.add(process)
        return EmbeddingStore(
            self.arena, holder=f"h{self.num_opened}", rows=ROWS, process=process, lives=self.alive.__contains__
        )

    @rule(at=st.integers(0, 2), key=st.sampled_from("abcdefgh"), num_rows=st.integers(1, 20))
    def reserve(self, at: int, key: str, num_rows: int) -> None:
        """Also what is published, or reserved by another: processes do not know of each other."""
        number = self.truth.reserve(self.names[at], key, -(-num_rows * ROW_BYTES // PAGE_BYTES))
        usage = self.stores[at].usage()
        try:
            reservation = self.stores[at].reserve(MediaKey(key), num_rows)
        except ArenaFull:
            assert number is None, "refused though there was room"
            assert self.stores[at].usage().evictable_bytes == usage.evictable_bytes, "evicted in vain"
        else:
            assert number is not None, "room where there was none"
            assert reservation.extent == self.truth.reservations[number].extent
            self.reserved.append((at, self.names[at], reservation, num_rows, number))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        at, _, reservation, num_rows, number = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if not good:
            self.stores[at].abandon(reservation)
            self.truth.abandon(number)
            return
        content = fill(reservation.key, num_rows)
        reservation.destination[:] = content
        is_first = self.stores[at].publish(reservation, layout=layout_of(num_rows), checksum=checksum(content))
        assert is_first == self.truth.publish(number)

    @rule(at=st.integers(0, 2), key=st.sampled_from("abcdefgh"), owner=st.sampled_from("xy"), lasts_s=st.integers(1, 5))
    def lease(self, at: int, key: str, owner: str, lasts_s: int) -> None:
        if key not in self.truth.entries:
            with pytest.raises(KeyError):
                self.stores[at].lease(MediaKey(key), owner=owner, expires_s=1.0)
            return
        ref = self.stores[at].lease(MediaKey(key), owner=owner, expires_s=self.now_s + lasts_s)
        self.refs[self.truth.lease(key, self.names[at], owner, self.now_s + lasts_s)] = (ref, lasts_s)

    @precondition(lambda self: self.refs)
    @rule(at=st.integers(0, 2), data=st.data())
    def release(self, at: int, data: st.DataObject) -> None:
        """Through any store; also leases that have ended."""
        number = data.draw(st.sampled_from(sorted(self.refs)))
        assert self.stores[at].release(self.refs[number][0].lease_id) == self.truth.release(number)

    @rule(at=st.integers(0, 2), owner=st.sampled_from("xy"))
    def peer_leaves(self, at: int, owner: str) -> None:
        assert self.stores[at].release_owner(owner) == self.truth.release_owner(self.names[at], owner)

    @rule(at=st.integers(0, 2), owner=st.sampled_from("xy"), data=st.data())
    def peer_is_back(self, at: int, owner: str, data: st.DataObject) -> None:
        kept = set(data.draw(st.lists(st.sampled_from(sorted(self.refs))))) if self.refs else set()
        lease_ids = {self.refs[number][0].lease_id for number in kept}
        assert self.stores[at].keep_only(owner, lease_ids) == self.truth.keep_only(owner, kept)

    @rule(at=st.integers(0, 2), seconds=st.integers(1, 3))
    def pass_time(self, at: int, seconds: int) -> None:
        self.now_s += seconds
        assert self.stores[at].expire(self.now_s) == self.truth.expire(self.now_s)

    @rule()
    def clear(self) -> None:
        assert clear_arena(self.arena) == self.truth.clear() * PAGE_BYTES

    @rule(at=st.integers(0, 2), inside=st.booleans())
    def die(self, at: int, inside: bool) -> None:
        """Like SIGKILL: the connection goes, inside a transaction or not, without a word. Another takes its place."""
        store = self.stores[at]
        if inside:
            store._index._database.execute("BEGIN IMMEDIATE")
            store._index.run("DELETE FROM entries")
        store._index.close()
        self.alive = {process for process in self.alive if f"h{process.pid}" != self.names[at]}
        for living in self.stores:
            living._lives = self.alive.__contains__
        self.truth.dead.add(self.names[at])
        self.reserved = [held for held in self.reserved if held[1] != self.names[at]]
        self.stores[at] = self.opened()
        self.names[at] = f"h{self.num_opened}"

    @rule(at=st.integers(0, 2))
    def keep_house(self, at: int) -> None:
        self.stores[at].tidy()
        self.truth.reclaim()

    @invariant()
    def both_agree(self) -> None:
        if not self.stores:
            return
        store = self.stores[self.num_opened % 3]
        store.check()
        pages, usage = self.truth.pages(), store.usage()
        states = (usage.free_bytes, usage.evictable_bytes, usage.leased_bytes, usage.reserved_bytes)
        assert states == tuple(pages.count(letter) * PAGE_BYTES for letter in ".eLR")
        assert (len(store), store.num_leases) == (len(self.truth.entries), len(self.truth.leases))
        for key, held in self.truth.entries.items():
            entry = store.lookup(MediaKey(key))
            assert entry is not None
            assert (entry.extent, entry.num_leases) == (held.extent, len(held.leases))
            assert store.content(MediaKey(key)) == fill(key, entry.layout.num_rows)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        remove_arena(self.arena)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
test_store_machine = StoreMachine.TestCase
