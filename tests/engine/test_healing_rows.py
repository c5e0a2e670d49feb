"""Which rows healing runs, against a simulation of what depends on what; where windows lie, against a dict."""

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.heal_rows import HealRing, first_rows, ring_pages

layer_kinds = st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=7)
page_sizes = st.sampled_from([1, 2, 4, 8])


def windows_are_exact(reaches: list[int | None], rows: list[int], stop: int, page_size: int) -> bool:
    """Run each layer on its rows alone: are all window pages that token `stop` reads exact in every window layer?

    A row is right when its input was, and, in a window layer, the keys of every row it sees were written and right.
    """
    widest = max(reach for reach in reaches if reach is not None)
    wanted = range(max(0, stop - -(-widest // page_size) * page_size), stop)
    is_right = {row: row >= rows[0] for row in range(stop)}
    for reach, first in zip(reaches, rows, strict=False):
        keys = {row for row in range(first, stop) if is_right[row]}
        if reach is not None:
            if not all(row in keys for row in wanted):
                return False
            is_right = {
                row: row in keys and all(seen in keys for seen in range(max(0, row - reach), row + 1))
                for row in range(stop)
            }
        else:
            is_right = {row: row in keys for row in range(stop)}
    return True


@settings(max_examples=150, deadline=None)
@given(layer_kinds, st.integers(1, 40), page_sizes)
def test_rows_are_enough_and_not_a_page_too_many(reaches: list[int | None], num_pages: int, page_size: int) -> None:
    stop = num_pages * page_size
    rows = list(first_rows(reaches, stop, page_size=page_size))
    if all(reach is None for reach in reaches):
        assert rows == []
        return
    assert len(rows) == max(index for index, reach in enumerate(reaches) if reach is not None) + 1
    assert rows == sorted(rows)
    assert all(row % page_size == 0 and 0 <= row < stop for row in rows)
    assert windows_are_exact(reaches, rows, stop, page_size)
    for index in range(len(rows)):
        # One page less in this layer, and in those above that would then have more than it.
        fewer = [row if i < index else max(row, rows[index] + page_size) for i, row in enumerate(rows)]
        assert not windows_are_exact(reaches, fewer, stop, page_size)


def test_as_many_rows_as_the_published_models_need() -> None:
    """70 layers with 60 window layers; 48 with 39. One window and one reach less than layers times reach, in pages."""
    pro = [None, *([127] * 6), *([None, *([127] * 6)] * 9)]
    assert 200_000 - first_rows(pro, 200_000, page_size=16)[0] == 7632
    flash = [None, *([127] * 39)]
    assert 100_000 - first_rows(flash, 100_000, page_size=16)[0] == 4960
    assert first_rows(flash, 160, page_size=16)[0] == 0


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(1, 40),
    st.integers(0, 20),
    page_sizes,
    st.integers(1, 6),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_a_ring_holds_what_each_chunk_reads_and_at_last_the_window(
    first_page: int, num_pages: int, window_tokens: int, page_size: int, chunk_pages: int, budgets: list[int]
) -> None:
    window_pages = -(-window_tokens // page_size)
    num_places = ring_pages(num_pages, window_pages=window_pages, chunk_pages=chunk_pages)
    assert num_places <= window_pages + chunk_pages
    stop_page = first_page + num_pages
    ring = HealRing(first_page, stop_page, num_places, window_tokens, page_size)
    held: dict[int, tuple[int, int]] = {}  # place -> row page, and how many of its tokens are written
    start, turn = first_page * page_size, 0
    while start < stop_page * page_size:
        stop = min(start + budgets[turn % len(budgets)], ring.limit(start))
        assert stop > start
        if start % page_size == 0:
            # A whole chunk fits, if it begins with a page.
            assert ring.limit(start) >= min(start + chunk_pages * page_size, stop_page * page_size)
        turn += 1
        places = ring.places(start, stop)
        pages = range(ring.window_start(start), -(-stop // page_size))
        assert len(set(places)) == len(places) == len(pages)
        for page, place in zip(pages, places, strict=True):
            if page * page_size < start:
                assert held[place] == (page, min((page + 1) * page_size, start) - page * page_size)
            if (page + 1) * page_size > start:
                held[place] = (page, min((page + 1) * page_size, stop) - page * page_size)
        assert pages[0] == first_page or pages[0] * page_size <= start - window_tokens
        start = stop
    for place in range(num_places):
        assert held[place] == (stop_page - num_places + place, page_size)
    assert num_places >= min(num_pages, window_pages)
