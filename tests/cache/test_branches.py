"""Anchors: boundaries learned from lookups and from prompts that part, strides by the length of the prompt."""

from __future__ import annotations

from dataclasses import Field, fields

import pytest

from epd.cache.retention import RetentionPolicy
from tests.fakes.cache_driver import CacheDriver, text


def ends_only(**changes: bool | int) -> RetentionPolicy:
    values: dict[str, bool | int] = {"retention_stride_tokens": 0, "at_chunk_ends": False}
    return RetentionPolicy(**(values | {"learning_threshold_tokens": 16} | changes))  # type: ignore[arg-type]


def test_the_second_prompt_teaches_the_third_where_they_part() -> None:
    driver = CacheDriver(retention=ends_only())
    found = [driver.serve(text(0, 61) + text(1 + user, 30), chunk_tokens=16) for user in range(3)]
    assert found == [0, 0, 60]


def test_nothing_is_learned_when_that_is_off() -> None:
    driver = CacheDriver(retention=ends_only(learns_branches=False))
    found = [driver.serve(text(0, 61) + text(1 + user, 30), chunk_tokens=16) for user in range(4)]
    assert found == [0, 0, 0, 0]


@pytest.mark.parametrize(("threshold", "learns"), [(40, True), (41, False)])
def test_a_lookup_must_have_lost_enough(threshold: int, learns: bool) -> None:
    """Full pages to 60, windows to 20: the third prompt ends inside what the first two share."""
    driver = CacheDriver(retention=ends_only(learning_threshold_tokens=threshold))
    driver.serve(text(0, 21))
    driver.serve(text(0, 80), chunk_tokens=16)
    again = text(0, 61)
    assert driver.cache.match(driver.keys(again), 61).num_full_only_tokens == 60
    assert driver.hit(again) == 20
    # Ends inside a page more than it shares, so that its own end is another boundary.
    driver.serve([*again, 7, 7, 7, 7, 7, 7, 7, 7, 7], chunk_tokens=16)
    policy = driver.cache.retention
    assert policy.learns_from(20, 60) == learns
    assert driver.hit(again) == 60  # they parted there: kept in any case


def test_a_full_match_that_ended_early_is_learned_where_pages_did_not_part() -> None:
    """Full pages were evicted beyond 40, so the lookup ends where nobody went another way."""
    for learns in (True, False):
        driver = CacheDriver(retention=ends_only(learns_branches=learns))
        driver.serve(text(0, 80), chunk_tokens=16)
        driver.cache._ledger.evict_full(10)
        assert driver.cache.match(driver.keys(text(0, 80)), 80).num_full_only_tokens == 40
        driver.serve(text(0, 80), chunk_tokens=16)
        assert driver.hit(text(0, 41)) == (40 if learns else 0)


def test_two_at_once_part_without_a_lookup_to_learn_from() -> None:
    """Both begin before either has published: only the tree sees where they part."""
    for learns in (True, False):
        driver = CacheDriver(retention=ends_only(learns_branches=learns))
        prompts = [text(0, 61) + text(user, 31) for user in (1, 2)]
        rows = [driver.cache.begin(driver.keys(prompt), len(prompt)) for prompt in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            assert row.num_cached_tokens == 0
            driver.advance(row, driver.keys(prompt), len(prompt), chunk_tokens=16)
        for row in rows:
            row.finish()
        driver.check()
        assert driver.hit([*text(0, 61), 9]) == (60 if learns else 0)


def test_a_junction_behind_a_healed_window_is_kept_too() -> None:
    driver = CacheDriver(retention=ends_only())
    driver.serve(text(0, 61) + text(1, 30), chunk_tokens=16)
    driver.cache._ledger.evict_window(100)
    other = text(0, 61) + text(2, 60)
    keys = driver.keys(other)
    pages = driver.cache.begin(keys, len(other), full_only=True)
    assert pages.num_cached_tokens == 60
    pages.extend(60, window_start=10)
    driver.advance(pages, keys, len(other), chunk_tokens=16)
    pages.finish()
    driver.check()
    assert driver.hit([*text(0, 61), 9, 9]) == 60


@pytest.mark.parametrize("first_page", [14, 28])
def test_a_receiver_without_the_whole_window_keeps_no_part_of_it(first_page: int) -> None:
    """The junction at page 15 needs the windows of pages 13 and 14."""
    driver = CacheDriver(retention=ends_only())
    driver.serve(text(0, 61) + text(1, 30), chunk_tokens=16)
    driver.cache._ledger.evict_window(100)
    other = text(0, 61) + text(2, 60)
    pages = driver.cache.begin(driver.keys(other), len(other), full_only=True)
    pages.extend(len(other), window_start=first_page)
    pages.commit(len(other), driver.keys(other))
    pages.finish()
    driver.check()
    assert driver.hit([*text(0, 61), 9, 9]) == 0
    assert driver.hit([*other, 9]) == 120
    assert driver.cache.stats().window.evictable == min(3, 30 - first_page)


@pytest.mark.parametrize(("num_tokens", "boundaries"), [(95, [16, 32, 48, 64, 80]), (100, [32, 64, 96])])
def test_long_prompts_have_a_stride_of_their_own(num_tokens: int, boundaries: list[int]) -> None:
    retention = RetentionPolicy(
        retention_stride_tokens=16, long_prompt_tokens=100, long_stride_tokens=32, at_chunk_ends=False
    )
    driver = CacheDriver(retention=retention)
    driver.serve(text(0, num_tokens), chunk_tokens=40)
    found = [boundary for boundary in range(4, 84, 4) if driver.hit(text(0, boundary + 1)) == boundary]
    assert found == [boundary for boundary in boundaries if boundary < 84]


@pytest.mark.parametrize("field", fields(RetentionPolicy), ids=lambda field: field.name)
@pytest.mark.parametrize("value", [-1, 1.5, float("nan")])
def test_nonsense_is_refused_by_name(field: Field[object], value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field.name} is {value}; allowed: "):
        RetentionPolicy(**{field.name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tail_pages", "release_interval_tokens", "learning_threshold_tokens"])
def test_some_fields_must_be_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; allowed: 1 or more"):
        RetentionPolicy(**{name: 0})  # type: ignore[arg-type]


def test_anchors_at_chunk_ends_do_not_crowd_out_ends() -> None:
    """A long prompt leaves a window at the end of each chunk; short of room, those go before anybody's end."""
    driver = CacheDriver(num_full=1000, num_window=60, retention=RetentionPolicy(retention_stride_tokens=64))
    for session in range(4):
        driver.serve(text(session, 41))
    driver.serve(text(9, 900), chunk_tokens=16)
    assert driver.cache.stats().num_evicted_window_pages > 0
    assert [driver.hit(text(session, 42)) for session in range(4)] == [40] * 4
    assert driver.hit(text(9, 901)) == 900
