"""Windows opened anew and never committed are the row's own: no end of the row may give them to the tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd.cache.sequence_pages import SequencePages
from tests.fakes.cache_driver import CacheDriver, text

TOKENS = text(1, 40)


@pytest.fixture
def driver() -> CacheDriver:
    """One finished request of ten pages, its last two with windows, and one before."""
    driver = CacheDriver(page_size=4, window_tokens=8)
    driver.serve(TOKENS)
    return driver


def leased_without_windows(driver: CacheDriver) -> SequencePages:
    return driver.cache.begin(driver.keys(TOKENS), 41, full_only=True)


@pytest.mark.parametrize("end", [SequencePages.finish, SequencePages.abort, SequencePages.condemn])
@pytest.mark.parametrize(("num_tokens", "window_start"), [(44, 5), (41, 0), (40, 8), (48, 10)])
def test_a_lease_that_ends_before_its_windows_are_written_leaves_nothing(
    driver: CacheDriver, num_tokens: int, window_start: int, end: Callable[[SequencePages], None]
) -> None:
    pages = leased_without_windows(driver)
    pages.extend(num_tokens, window_start=window_start)
    end(pages)
    driver.check()
    if end is not SequencePages.condemn:
        assert driver.hit([*TOKENS, 1]) == 40


def test_a_row_that_reopens_what_it_has_committed_may_finish(driver: CacheDriver) -> None:
    keys = driver.keys(text(2, 40))
    pages = driver.cache.begin(keys, 40)
    driver.advance(pages, keys, 40)
    pages.extend(40, window_start=0)
    pages.finish()
    driver.check()
    assert driver.cache.stats().window.leased == 0


def test_who_gets_the_pages_next_does_not_keep_them(driver: CacheDriver) -> None:
    """Nothing remembers that an earlier row meant to keep these pages: windows behind the next row go."""
    pages = leased_without_windows(driver)
    pages.extend(44, window_start=5)
    pages.finish()
    keys = driver.keys(text(3, 60))
    row = driver.cache.begin(keys, 60)
    driver.advance(row, keys, 60, chunk_tokens=4)
    row.abort()
    others = driver.cache.stats().window
    assert others.total - others.free <= 3 + 3, "the windows before an aborted row's last were kept"
