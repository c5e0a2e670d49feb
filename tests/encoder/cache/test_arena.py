"""Page allocation against a bitmap, and the shared-memory segment as other processes see it."""

import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.cache.arena import SHM_DIR, Extent, Segment, attach, create_segment, remove_arena, segment_path
from encoder.cache.host import embedding_arena, private_arena
from encoder.cache.index import Index, create_arena
from encoder.config import EncoderConfig
from encoder.errors import ArenaUnavailable

NUM_PAGES = 40


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-20, 15), max_size=80))
def test_pages_equal_a_bitmap(actions: list[int]) -> None:
    """Positive: take so many pages. Negative or zero: give the extent with that number back."""
    name = f"test-{uuid.uuid4().hex}"
    create_arena(name, size_bytes=NUM_PAGES * 64, page_bytes=64)
    index = Index(name)
    used = [False] * NUM_PAGES
    held: list[Extent] = []
    for action in actions:
        with index.writing():
            if action > 0:
                fits = [i for i in range(NUM_PAGES - action + 1) if not any(used[i : i + action])]
                extent = index.take_pages(action)
                assert extent == (Extent(fits[0], fits[0] + action) if fits else None)
                if extent is not None:
                    held.append(extent)
                    used[extent.start : extent.stop] = [True] * action
            elif held:
                extent = held.pop(action % len(held))
                merged = index.give_pages(extent)
                used[extent.start : extent.stop] = [False] * extent.num_pages
                assert not any(used[merged.start : merged.stop])
        runs = index.rows("SELECT start, stop FROM free ORDER BY start")
        assert {page for start, stop in runs for page in range(start, stop)} == {
            page for page in range(NUM_PAGES) if not used[page]
        }
        assert all(before[1] < after[0] for before, after in pairwise(runs))
    index.close()
    remove_arena(name)


@pytest.fixture
def segment() -> Iterator[Segment]:
    name = f"test-{uuid.uuid4().hex}"
    create_segment(name, 64 * 1024)
    yield Segment(name, page_bytes=4096)
    remove_arena(name)


def test_another_process_reads_and_leaves_the_segment_in_place(segment: Segment) -> None:
    segment.view(Extent(0, 2), 5)[:] = b"hello"
    probe = f"from encoder.cache.arena import attach; print(bytes(attach({segment.name!r})[:5]).decode())"
    for _ in range(2):  # a first reader's exit must not take the segment away from the second
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "hello"
        assert done.stderr == ""
    assert segment_path(segment.name).exists()


def test_all_writers_see_one_memory_and_readers_cannot_change_it(segment: Segment) -> None:
    reader = attach(segment.name)
    segment.view(Extent(0, 1), 3)[:] = b"new"
    Segment(segment.name, page_bytes=4096).view(Extent(1, 2), 4)[:] = b"also"
    assert reader[:3] == b"new"
    assert reader[4096:4100] == b"also"
    assert bytes(segment.view(Extent(1, 2), 4)) == b"also"
    reader[4096:4100] = b"evil"
    assert bytes(attach(segment.name)[4096:4100]) == b"also"


def test_extents_are_aligned_and_a_mapping_outlives_the_name(segment: Segment) -> None:
    assert segment.offset_bytes(Extent(1, 2)) % 64 == 0
    reader = attach(segment.name)
    segment.view(Extent(0, 1), 1)[:] = b"x"
    remove_arena(segment.name)
    assert reader[:1] == b"x"
    with pytest.raises(FileNotFoundError):
        attach(segment.name)
    with pytest.raises(ArenaUnavailable, match="no embedding arena"):
        Segment(segment.name, page_bytes=4096)


def test_a_segment_left_behind_is_replaced(segment: Segment) -> None:
    segment.view(Extent(0, 1), 3)[:] = b"old"
    create_segment(segment.name, 8192)
    assert attach(segment.name)[:] == bytes(8192)


def test_an_arena_is_its_owners_alone_and_goes_with_the_block() -> None:
    name = f"test-{uuid.uuid4().hex}"
    config = EncoderConfig(arena_bytes=64 * 1024)
    with embedding_arena(config, name):
        Index(name)  # left open: whoever uses the arena, it is unlinked
        files = list(SHM_DIR.glob(f"{name}*"))
        assert {path.name.removeprefix(name) for path in files} >= {"", ".index"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert list(SHM_DIR.glob(f"{name}*")) == []


def test_a_private_arena_replaces_those_of_dead_processes() -> None:
    name = f"test-{uuid.uuid4().hex}"
    create_arena(f"{name}.dead", size_bytes=4096, page_bytes=4096)
    with private_arena(EncoderConfig(arena_bytes=4096), name, "young") as arena:
        assert arena == f"{name}.young"
        assert all(path.name.startswith(arena) for path in SHM_DIR.glob(f"{name}*"))
    assert list(SHM_DIR.glob(f"{name}*")) == []


def test_too_little_shared_memory_is_said_at_creation() -> None:
    name = f"test-{uuid.uuid4().hex}"
    with pytest.raises(ArenaUnavailable, match="MiB of shared memory"):
        create_arena(name, size_bytes=2**50, page_bytes=4096)
    assert list(SHM_DIR.glob(f"{name}*")) == []


@pytest.mark.parametrize("name", ["", "../etc", "a/b", ".hidden"])
def test_names_stay_inside_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match="not a segment name"):
        segment_path(name)
