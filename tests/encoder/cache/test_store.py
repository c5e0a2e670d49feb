"""The embedding cache under random use: books balance, leased bytes never change, eviction takes the oldest first."""

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder.cache.arena import Arena, attach, checksum
from encoder.cache.index import CacheIndex, Entry
from encoder.cache.store import EmbeddingStore, Reservation
from encoder.errors import ArenaFull, EmbeddingTooLarge
from encoder.types import EmbeddingRef
from preprocess.types import MediaKey, MediaLayout, Modality

ROW_BYTES = 64
PAGE_BYTES = 128
NUM_PAGES = 24


def layout_of(num_rows: int) -> MediaLayout:
    return MediaLayout(modality=Modality.AUDIO, num_audio_rows=num_rows)


def new_store() -> EmbeddingStore:
    arena = Arena(f"test-{uuid.uuid4().hex}", size_bytes=NUM_PAGES * PAGE_BYTES, page_bytes=PAGE_BYTES)
    return EmbeddingStore(arena, CacheIndex("inc"), width=16, dtype="float32", row_bytes=ROW_BYTES)


def fill(key: str, num_rows: int) -> bytes:
    return key.encode().ljust(8, b".") * (num_rows * ROW_BYTES // 8)


def put(store: EmbeddingStore, key: str, num_rows: int) -> None:
    reservation = store.reserve(MediaKey(key), num_rows)
    content = fill(key, num_rows)
    reservation.destination[:] = content
    store.publish(reservation, layout=layout_of(num_rows), checksum=checksum(content))


@pytest.fixture
def store() -> Iterator[EmbeddingStore]:
    made = new_store()
    yield made
    made.check()
    made.close()


def test_publish_then_lease_gives_the_bytes(store: EmbeddingStore) -> None:
    put(store, "a", 3)
    ref = store.lease(MediaKey("a"), owner="me", expires_s=10.0)
    segment = attach(ref.arena)
    content = segment[ref.offset_bytes : ref.offset_bytes + ref.num_rows * ROW_BYTES]
    assert content == fill("a", 3)
    assert checksum(content) == ref.checksum
    assert store.content(MediaKey("a")) == content


def test_least_recently_released_goes_first(store: EmbeddingStore) -> None:
    for key in "abc":
        put(store, key, 16)  # 8 pages each, the arena is full
    lease = store.lease(MediaKey("a"), owner="me", expires_s=10.0)
    store.release(lease.lease_id)
    put(store, "d", 16)
    assert [key for key in "abcd" if store.lookup(MediaKey(key))] == ["a", "c", "d"]


def test_leases_block_eviction_and_expire(store: EmbeddingStore) -> None:
    for key in "abc":
        put(store, key, 16)
        store.lease(MediaKey(key), owner=f"peer-{key}", expires_s=ord(key))
    with pytest.raises(ArenaFull) as caught:
        store.reserve(MediaKey("d"), 1)
    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    assert store.expire(ord("a") - 1) == 0
    assert store.expire(ord("a")) == 1
    assert store.release_owner("peer-b") == 1
    put(store, "d", 32)
    assert store.lookup(MediaKey("c")) is not None


def test_what_never_fits_is_refused_for_good(store: EmbeddingStore) -> None:
    with pytest.raises(EmbeddingTooLarge) as caught:
        store.reserve(MediaKey("a"), NUM_PAGES * PAGE_BYTES // ROW_BYTES + 1)
    assert caught.value.status == 413


def test_first_published_value_stays(store: EmbeddingStore) -> None:
    put(store, "a", 1)
    again = store.reserve(MediaKey("a"), 1)
    with pytest.raises(ValueError, match="first value is the value"):
        store.publish(again, layout=layout_of(1), checksum=0)
    store.abandon(again)


def test_lease_ids_of_another_process_mean_nothing(store: EmbeddingStore) -> None:
    put(store, "a", 1)
    ref = store.lease(MediaKey("a"), owner="me", expires_s=1.0)
    assert not store.release(ref.lease_id.replace("inc", "old"))
    assert store.release(ref.lease_id)
    assert not store.release(ref.lease_id)


def test_a_leased_entry_cannot_be_removed() -> None:
    index = CacheIndex("inc")
    arena = Arena(f"test-{uuid.uuid4().hex}", size_bytes=4096, page_bytes=4096)
    extent = arena.pages.reserve(1)
    arena.close()
    assert extent is not None
    index.add(Entry(MediaKey("a"), extent, layout_of(1), 0))
    index.lease(MediaKey("a"), owner="me", expires_s=1.0)
    with pytest.raises(ValueError, match="leases"):
        index.remove(MediaKey("a"))
    assert index.next_expiry_s() == 1.0


class StoreMachine(RuleBasedStateMachine):
    """A dictionary of leased bytes is the truth that the arena has to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store()
        self.now_s = 0.0
        self.reserved: list[tuple[Reservation, str, int]] = []
        self.refs: dict[str, tuple[EmbeddingRef, float]] = {}

    @rule(key=st.sampled_from("abcdefgh"), num_rows=st.integers(1, 20))
    def reserve(self, key: str, num_rows: int) -> None:
        taken = {name for _, name, _ in self.reserved}
        if key in taken or self.store.lookup(MediaKey(key)):
            return
        usage = self.store.usage()
        try:
            self.reserved.append((self.store.reserve(MediaKey(key), num_rows), key, num_rows))
        except ArenaFull:
            assert self.store.usage() == usage, "evicted in vain"
            assert self.longest_run() * PAGE_BYTES < num_rows * ROW_BYTES, "refused though evicting would have helped"

    def longest_run(self) -> int:
        """Pages in one piece that are neither leased nor reserved, counted page by page."""
        entries = [entry.extent for entry in self.store._index.entries() if entry.leases]
        kept = {
            page
            for extent in [*entries, *(reservation.extent for reservation, _, _ in self.reserved)]
            for page in range(extent.start, extent.stop)
        }
        pages = "".join("x" if page in kept else "." for page in range(NUM_PAGES))
        return max(len(run) for run in pages.split("x"))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        reservation, key, num_rows = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if not good:
            self.store.abandon(reservation)
            return
        reservation.destination[:] = fill(key, num_rows)
        self.store.publish(reservation, layout=layout_of(num_rows), checksum=checksum(fill(key, num_rows)))

    @rule(key=st.sampled_from("abcdefgh"), lasts_s=st.integers(1, 5))
    def lease(self, key: str, lasts_s: int) -> None:
        if self.store.lookup(MediaKey(key)):
            ref = self.store.lease(MediaKey(key), owner=key, expires_s=self.now_s + lasts_s)
            self.refs[ref.lease_id] = (ref, self.now_s + lasts_s)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.refs)))
        assert self.store.release(lease_id)
        del self.refs[lease_id]

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        expired = [lease_id for lease_id, (_, expires_s) in self.refs.items() if expires_s <= self.now_s]
        assert self.store.expire(self.now_s) == len(expired)
        for lease_id in expired:
            del self.refs[lease_id]

    @invariant()
    def leased_bytes_are_intact(self) -> None:
        self.store.check()
        assert self.store.num_leases == len(self.refs)
        for ref, _ in self.refs.values():
            assert self.store.content(ref.key) == fill(ref.key, ref.num_rows)

    def teardown(self) -> None:
        self.store.close()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_store_machine = StoreMachine.TestCase
