"""Cached prefixes on their way from the store to the host, for requests in line.

    submit --begin--> fetching --all there, or out of time--> in line for pages --admitted--> forgotten
                         |                                        (the host keeps what came until then)
                         +--ended, aborted----------------------------------------------------^

A store that is slow costs its own requests a bounded wait, and nothing else: what has not come by then is computed.
"""

from __future__ import annotations

import time
from typing import Protocol

from epd.cache.tiers.above import device_has
from epd.cache.tiers.bridge import StoreBridge
from epd.cache.tiers.tiered import TieredCache
from epd.engine.clock import Clock
from epd.engine.sequence import Sequence

__all__ = ["NO_STORE", "PrefixSupply", "StorePrefixes"]


class PrefixSupply(Protocol):
    """The line's side of the store."""

    def begin(self, sequence: Sequence) -> None:
        """Fetch what neither device nor host has of its prefix, without waiting. Once for a request."""
        ...

    def is_fetching(self, request_id: str) -> bool: ...

    def collect(self) -> tuple[str, ...]:
        """Requests that have become ready since the last call, whether anything came or not."""
        ...

    def forget(self, request_id: str) -> None:
        """It has its pages, or has ended. Unknown ids are ignored."""
        ...

    def num_fetched_tokens(self, request_id: str) -> int:
        """Tokens of the prompt that came from the store for this request, until it is forgotten."""
        ...


class StorePrefixes:
    """The supply of a worker with a store. What was fetched stays in the host's memory until `forget`."""

    def __init__(self, cache: TieredCache, bridge: StoreBridge, clock: Clock) -> None:
        self._cache = cache
        self._bridge = bridge
        self._clock = clock

    def begin(self, sequence: Sequence) -> None:
        request, keys = sequence.request, sequence.chain.keys
        if not request.use_cache or not self._cache.enabled:
            return
        # Deadlines of requests are in unix time, those of the store in monotonic.
        left_s = request.deadline_unix_s - self._clock.unix_s()
        above = device_has(self._cache.device, keys, sequence.num_tokens)
        self._bridge.prefetch(
            request.request_id,
            tuple(keys),
            sequence.num_tokens,
            above,
            group=request.session,
            deadline_s=time.monotonic() + left_s,
        )

    def is_fetching(self, request_id: str) -> bool:
        return self._bridge.is_fetching(request_id)

    def collect(self) -> tuple[str, ...]:
        return self._bridge.collect()

    def forget(self, request_id: str) -> None:
        self._bridge.forget(request_id)

    def num_fetched_tokens(self, request_id: str) -> int:
        return self._bridge.num_fetched_pages(request_id) * self._cache.page_size


class _NoStore:
    def begin(self, sequence: Sequence) -> None:
        """There is nothing to fetch."""

    def is_fetching(self, request_id: str) -> bool:
        return False

    def collect(self) -> tuple[str, ...]:
        return ()

    def forget(self, request_id: str) -> None:
        """Nothing is known of anyone."""

    def num_fetched_tokens(self, request_id: str) -> int:
        return 0


NO_STORE: PrefixSupply = _NoStore()
"""The supply of a worker without a store."""
