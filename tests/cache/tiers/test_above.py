"""What a prefetch is told of the device: full pages from the start, and whose windows are live."""

from __future__ import annotations

from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.tiers.above import device_has
from epd.kv.dual import DualPool
from tests.fakes.bridge_world import PAGE_SIZE, chain

KEYS = chain("prompt", 8)


def test_a_snapshot_of_the_tree() -> None:
    pool = DualPool(num_full_pages=16, num_window_pages=16)
    cache = PrefixCache(pool, page_size=PAGE_SIZE, window_tokens=2 * PAGE_SIZE, retention=RetentionPolicy())
    assert device_has(cache, KEYS, 100).num_full_pages == 0
    num_tokens = len(KEYS) * PAGE_SIZE
    row = cache.begin(KEYS, num_tokens)
    row.extend(num_tokens)
    row.commit(num_tokens, KEYS)
    row.finish()
    whole = device_has(cache, KEYS, num_tokens + 1)
    assert whole.num_full_pages == 8
    live = cache.match(KEYS, num_tokens + 1)
    assert live.num_tokens == num_tokens
    assert {6, 7} <= set(whole.window_pages)
    cache.ledger.evict_window(3)
    assert set(device_has(cache, KEYS, num_tokens + 1).window_pages) < set(whole.window_pages)
    short = device_has(cache, KEYS, 3 * PAGE_SIZE)
    assert short.num_full_pages == 2
    assert max(short.window_pages, default=0) < 2
