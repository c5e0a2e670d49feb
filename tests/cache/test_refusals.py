"""The cache's front refuses numbers that mean nothing, by name, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.sequence_pages import SequencePages
from epd.kv.dual import DualPool
from epd.kv.errors import PageStateError
from tests.fakes.cache_driver import CacheDriver, text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.match([], -3), "num_tokens is -3"),
        (lambda cache: cache.begin([], -3), "num_tokens is -3"),
        (lambda cache: cache.begin([], 8, max_cached_tokens=-9), "max_cached_tokens is -9"),
        (lambda cache: cache.begin([], 8, max_cached_tokens=1.5), "max_cached_tokens is 1.5"),
        (lambda cache: cache.fits(-1, -5), "num_full is -1"),
        (lambda cache: cache.fits(1, -5), "num_window is -5"),
        (lambda cache: cache.fits(1, 1, num_tokens=-2), "num_tokens is -2"),
        (lambda cache: cache.window_frontier(-4), "num_tokens is -4"),
    ],
)
def test_negative_numbers_are_refused_by_name(call: Callable[[PrefixCache], object], message: str) -> None:
    cache = CacheDriver().cache
    before = cache.stats()
    with pytest.raises(ValueError, match=f"{message}; allowed: .*0 or more"):
        call(cache)
    assert cache.stats() == before


@pytest.mark.parametrize(("page_size", "window_tokens"), [(0, 8), (4, -1), (4, 1.5)])
def test_a_cache_of_nonsense_is_refused(page_size: int, window_tokens: int) -> None:
    pool = DualPool(num_full_pages=4, num_window_pages=4)
    with pytest.raises(ValueError, match=r"page_size is 0|window_tokens is (-1|1.5)"):
        PrefixCache(pool, page_size=page_size, window_tokens=window_tokens, retention=RetentionPolicy())


@pytest.mark.parametrize("end", [SequencePages.finish, SequencePages.abort, SequencePages.condemn])
def test_nothing_can_be_asked_of_a_row_that_ended(end: Callable[[SequencePages], None]) -> None:
    pages = CacheDriver().prefill(text(1, 20))
    end(pages)
    calls = (lambda: pages.pages_needed(24), lambda: pages.extend(24), lambda: pages.commit(20, []))
    for call in calls:
        with pytest.raises(PageStateError, match="already given back"):
            call()
