"""Window pages of one sequence over 200,000 tokens, with the real allocator and a forward that writes nothing."""

from __future__ import annotations

import random

import pytest

from epd.cache.keys import page_keys
from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.kv.dual import DualPool

PAGE_SIZE = 16
WINDOW_TOKENS = 127
CHUNK_TOKENS = 2048
NUM_DRAFTS = 3
NUM_PROMPT_TOKENS = NUM_DECODED_TOKENS = 100_000


def limit_pages(in_flight_tokens: int, policy: RetentionPolicy) -> int:
    """W + tokens in flight + the release interval, in pages; one for a part of a page at either end, and the tail."""
    window_pages = -(-WINDOW_TOKENS // PAGE_SIZE)
    return (
        window_pages + -(-(in_flight_tokens + policy.release_interval_tokens - 1) // PAGE_SIZE) + 1 + policy.tail_pages
    )


@pytest.mark.parametrize("interval_tokens", [1, 128])
def test_window_use_is_steady_over_100k_prompt_and_100k_decoded_tokens(interval_tokens: int) -> None:
    policy = RetentionPolicy(
        retention_stride_tokens=0,
        long_stride_tokens=0,
        at_chunk_ends=False,
        learns_branches=False,
        release_interval_tokens=interval_tokens,
    )
    num_tokens = NUM_PROMPT_TOKENS + NUM_DECODED_TOKENS
    most_in_chunk, most_in_decode = limit_pages(CHUNK_TOKENS, policy), limit_pages(1 + NUM_DRAFTS, policy)
    # No window page more than the row's limit while it prefills: one page above it and the pool would refuse.
    pool = DualPool(num_full_pages=num_tokens // PAGE_SIZE + 2, num_window_pages=most_in_chunk)
    cache = PrefixCache(pool, page_size=PAGE_SIZE, window_tokens=WINDOW_TOKENS, retention=policy)
    keys = page_keys(range(num_tokens + NUM_DRAFTS), [], page_size=PAGE_SIZE, seed=b"steady")
    pages = cache.begin(keys, NUM_PROMPT_TOKENS)
    for stop in [*range(CHUNK_TOKENS, NUM_PROMPT_TOKENS, CHUNK_TOKENS), NUM_PROMPT_TOKENS]:
        pages.extend(stop)
        assert len(pages.window_pages) <= most_in_chunk
        pages.commit(stop, keys)
        assert len(pages.window_pages) <= limit_pages(0, policy)
    draw, committed, num_rejected = random.Random(1), NUM_PROMPT_TOKENS, 0
    while committed < num_tokens:
        pages.extend(committed + 1 + NUM_DRAFTS)
        assert len(pages.window_pages) <= most_in_decode
        accepted = draw.randint(0, NUM_DRAFTS)
        num_rejected += NUM_DRAFTS - accepted
        committed = min(num_tokens, committed + 1 + accepted)
        pages.commit(committed, keys)
        assert len(pages.window_pages) <= most_in_decode
        assert pages.window_start * PAGE_SIZE <= committed - WINDOW_TOKENS
    assert num_rejected > 10_000
    stats = cache.stats()
    # The prompt's end was an anchor: its window stays in the tree, evictable.
    assert stats.window.leased == len(pages.window_pages)
    assert stats.window.evictable <= WINDOW_TOKENS // PAGE_SIZE + 1 + policy.tail_pages
    pages.finish()
    cache.check()
    assert cache.match(keys, num_tokens).num_tokens == num_tokens - PAGE_SIZE
