"""Waiting for what is on its way between device, host and store, when nothing runs."""

import time

from epd.cache.tiers.tiered import TieredCache

__all__ = ["settle"]

_POLL_S = 0.001


def settle(cache: TieredCache, timeout_s: float) -> bool:
    """Book copies and store calls until none is left; False when that takes longer than `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while cache.next_event_pending:
        cache.poll()
        if time.monotonic() >= until_s:
            return not cache.next_event_pending
        time.sleep(_POLL_S)
    return True
