"""The usable-prefix rule and the release frontier, against token-by-token arithmetic."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from epd.cache.window import longest_usable, num_window_pages, release_frontier, window_floor
from tests.oracles.effort import effort
from tests.oracles.prefix_oracle import brute_force_hit


@pytest.mark.parametrize(
    ("window_tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (127, 8), (128, 8), (129, 9)]
)
def test_window_pages_around_page_multiples(window_tokens: int, pages: int) -> None:
    assert num_window_pages(window_tokens, 16) == pages


@effort(200)
@given(live=st.lists(st.booleans(), max_size=14), page_size=st.integers(1, 4), window_tokens=st.integers(0, 13))
def test_longest_usable_equals_brute_force(live: list[bool], page_size: int, window_tokens: int) -> None:
    keys = [bytes([index]) for index in range(len(live))]
    expected = brute_force_hit(
        dict(zip(keys, live, strict=True)),
        keys,
        len(live) * page_size + 1,
        page_size=page_size,
        window_tokens=window_tokens,
    )
    got = longest_usable(live, num_window_pages(window_tokens, page_size), len(live))
    assert got * page_size == expected


@effort(200)
@given(live=st.lists(st.booleans(), max_size=14), window_pages=st.integers(1, 6))
def test_a_smaller_window_never_hits_less(live: list[bool], window_pages: int) -> None:
    assert longest_usable(live, window_pages - 1, len(live)) >= longest_usable(live, window_pages, len(live))


@effort(300)
@given(
    committed=st.integers(0, 300),
    window_tokens=st.integers(0, 40),
    page_size=st.integers(1, 20),
    tail_pages=st.integers(1, 2),
    interval=st.integers(1, 30),
)
def test_release_frontier(committed: int, window_tokens: int, page_size: int, tail_pages: int, interval: int) -> None:
    def frontier(num_tokens: int) -> int:
        return release_frontier(
            num_tokens,
            window_tokens=window_tokens,
            page_size=page_size,
            tail_pages=tail_pages,
            interval_tokens=interval,
        )

    first = frontier(committed)
    window_pages = num_window_pages(window_tokens, page_size)
    assert first == 0 or first * page_size <= committed - window_tokens
    assert first <= frontier(committed + 1)
    # The publish boundary and the tail_pages boundaries before it keep whole windows.
    for boundary in range(committed // page_size - tail_pages, committed // page_size + 1):
        assert boundary < 0 or first <= window_floor(boundary, window_pages)
    # What stays is bounded, whatever the length.
    assert committed - first * page_size <= window_tokens + (tail_pages + 2) * page_size + interval
