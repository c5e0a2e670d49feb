"""What the books of a long context cost: 12,500 pages, 200,000 tokens. Bounds are some ten times what a call takes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from epd.cache.prefix import PrefixCache
from epd.cache.retention import RetentionPolicy
from epd.cache.tiers.host import HostTier
from epd.cache.tiers.tiered import TieredCache
from epd.kv.copies import InstantMover
from epd.kv.dual import DualPool

P, NUM_PAGES = 16, 12_500
NUM_TOKENS = NUM_PAGES * P + 5


def taken_ms(call: Callable[[], object]) -> float:
    """Time of this process, the best of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def test_calls_on_a_long_context_are_quick() -> None:
    device = PrefixCache(
        DualPool(num_full_pages=14_000, num_window_pages=13_000),
        page_size=P,
        window_tokens=128,
        retention=RetentionPolicy(),
    )
    host = HostTier(num_full_pages=14_000, num_window_pages=1_000)
    cache = TieredCache(device, host=host, mover=InstantMover())
    keys = [random.Random(index).randbytes(16) for index in range(NUM_PAGES)]
    row = cache.resume(keys, NUM_TOKENS)
    row.extend(NUM_TOKENS)
    row.commit(NUM_TOKENS, keys)
    row.finish()
    cache.ended(keys, NUM_PAGES)
    for there in ("device", "host"):
        if there == "host":
            device.clear()
        hit = cache.match(keys, NUM_TOKENS)
        assert hit.num_tokens == NUM_PAGES * P
        assert hit.num_host_tokens == (NUM_PAGES * P if there == "host" else 0)
        assert taken_ms(lambda: cache.match(keys, NUM_TOKENS)) < 40
        assert taken_ms(partial(cache.admitted, keys, hit)) < 40
        assert taken_ms(lambda: cache.ended(keys, NUM_PAGES)) < 40
    assert taken_ms(lambda: cache.resume(keys, NUM_TOKENS).abort()) < 300


def test_a_long_path_without_windows_is_not_looked_at_page_by_page() -> None:
    """Full pages all the way and no window in the host: one look per window that is not there."""
    device = PrefixCache(
        DualPool(num_full_pages=0, num_window_pages=0), page_size=P, window_tokens=128, retention=RetentionPolicy()
    )
    host = HostTier(num_full_pages=NUM_PAGES, num_window_pages=8)
    cache = TieredCache(device, host=host, mover=InstantMover())
    keys = [random.Random(index).randbytes(16) for index in range(NUM_PAGES)]
    for pool, names in ((host.full, keys), (host.window, keys[100:108])):
        assert pool.reserve(names, root=keys[0]) is not None
        pool.publish(names)
    looks = 0
    get = host.window.get

    class Counting:
        num_ready = host.window.num_ready

        def get(self, key: bytes) -> int | None:
            nonlocal looks
            looks += 1
            return get(key)

    host.window = Counting()  # type: ignore[assignment]
    assert cache.match(keys, NUM_TOKENS).num_tokens == 108 * P
    assert looks < NUM_PAGES / 8 + 20
