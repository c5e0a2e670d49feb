"""Page allocation against a bitmap, and the shared-memory segment as other processes see it."""

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.cache.arena import SHM_DIR, Arena, Extent, PageAllocator, attach, segment_path
from encoder.errors import ArenaUnavailable

NUM_PAGES = 40


@settings(deadline=None)
@given(st.lists(st.integers(-20, 15), max_size=80))
def test_allocator_equals_a_bitmap(actions: list[int]) -> None:
    """Positive: reserve so many pages. Negative or zero: free the extent with that index."""
    pages = PageAllocator(NUM_PAGES)
    used = [False] * NUM_PAGES
    held: list[Extent] = []
    for action in actions:
        if action > 0:
            fits = [i for i in range(NUM_PAGES - action + 1) if not any(used[i : i + action])]
            extent = pages.reserve(action)
            assert extent == (Extent(fits[0], fits[0] + action) if fits else None)
            if extent is not None:
                held.append(extent)
                used[extent.start : extent.stop] = [True] * action
        elif held:
            extent = held.pop(action % len(held))
            pages.free(extent)
            used[extent.start : extent.stop] = [False] * extent.num_pages
        assert pages.num_free == used.count(False)
        free = {page for extent in pages.free_extents for page in range(extent.start, extent.stop)}
        assert free == {page for page in range(NUM_PAGES) if not used[page]}
        assert all(a.stop < b.start for a, b in zip(pages.free_extents, pages.free_extents[1:], strict=False))


def test_freeing_twice_or_outside_is_refused() -> None:
    pages = PageAllocator(8)
    extent = pages.reserve(3)
    assert extent is not None
    pages.free(extent)
    for wrong in (extent, Extent(6, 9), Extent(4, 4), Extent(-1, 1)):
        with pytest.raises(ValueError, match="was not reserved"):
            pages.free(wrong)
    with pytest.raises(ValueError, match="at least 1"):
        pages.reserve(0)


@pytest.fixture
def arena() -> Iterator[Arena]:
    segment = Arena(f"test-{uuid.uuid4().hex}", size_bytes=64 * 1024, page_bytes=4096)
    yield segment
    segment.close()


def test_another_process_reads_and_leaves_the_segment_in_place(arena: Arena) -> None:
    extent = arena.pages.reserve(2)
    assert extent is not None
    arena.view(extent, 5)[:] = b"hello"
    probe = f"from encoder.cache.arena import attach; print(bytes(attach({arena.name!r})[:5]).decode())"
    for _ in range(2):  # a first reader's exit must not take the segment away from the second
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "hello"
        assert done.stderr == ""
    assert segment_path(arena.name).exists()


def test_a_reader_sees_later_writes_but_cannot_make_them(arena: Arena) -> None:
    extent = arena.pages.reserve(1)
    assert extent is not None
    reader = attach(arena.name)
    arena.view(extent, 3)[:] = b"new"
    assert reader[:3] == b"new"
    reader[4096:4100] = b"evil"
    assert bytes(attach(arena.name)[4096:4100]) == bytes(4)


def test_extents_are_aligned_and_a_mapping_outlives_the_name(arena: Arena) -> None:
    extent = arena.pages.reserve(1)
    second = arena.pages.reserve(1)
    assert extent is not None
    assert second is not None
    assert arena.offset_bytes(second) % 64 == 0
    reader = attach(arena.name)
    arena.view(extent, 1)[:] = b"x"
    arena.close()
    assert reader[:1] == b"x"
    with pytest.raises(FileNotFoundError):
        attach(arena.name)


def test_a_segment_left_behind_is_replaced(arena: Arena) -> None:
    again = Arena(arena.name, size_bytes=8192, page_bytes=4096)
    assert len(attach(again.name)) == 8192


def test_too_little_shared_memory_is_said_at_creation() -> None:
    name = f"test-{uuid.uuid4().hex}"
    with pytest.raises(ArenaUnavailable, match="MiB of shared memory"):
        Arena(name, size_bytes=2**50, page_bytes=4096)
    assert not (SHM_DIR / name).exists()


@pytest.mark.parametrize("name", ["", "../etc", "a/b", ".hidden"])
def test_names_stay_inside_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match="not a segment name"):
        segment_path(name)
