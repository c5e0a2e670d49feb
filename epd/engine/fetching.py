"""What requests in line wait for beside their embeddings: cached prefixes on their way from the store to the host, and
grammars that are compiled.

    submit --begin--> fetching --all there, or out of time--> in line for pages --admitted--> forgotten
                         |                                        (the host keeps what came until then)
                         +--ended, aborted----------------------------------------------------^

A store that is slow costs its own requests a bounded wait, and nothing else: what has not come by then is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from llguidance import LLMatcher

from epd.cache.tiers.above import device_has
from epd.cache.tiers.bridge import StoreBridge
from epd.cache.tiers.tiered import TieredCache
from epd.engine.clock import Clock
from epd.engine.grammar import Grammars
from epd.engine.sequence import Sequence

__all__ = ["NO_STORE", "PrefixSupply", "StorePrefixes", "WithGrammars"]


class PrefixSupply(Protocol):
    """The line's side of the store."""

    def begin(self, sequence: Sequence) -> None:
        """Fetch what neither device nor host has of its prefix, without waiting. Once for a request."""
        ...

    def expect(self, sequence: Sequence) -> None:
        """As `begin`, of one whose prompt another worker has computed."""
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

    def expect(self, sequence: Sequence) -> None:
        """All of its KV has come."""

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

    def expect(self, sequence: Sequence) -> None:
        """Nor of these."""

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


class WithGrammars:
    """What another supply fetches, and grammars: an answer is not begun before its own is compiled, so that no step
    waits for one."""

    def __init__(self, prefixes: PrefixSupply, grammars: Grammars, *, wake: Callable[[], None]) -> None:
        """`wake` is called on another thread when one is done."""
        self._prefixes = prefixes
        self._grammars = grammars
        self._wake = wake
        self._compiling: dict[str, Future[LLMatcher]] = {}

    def begin(self, sequence: Sequence) -> None:
        self._prefixes.begin(sequence)
        self._compile(sequence)

    def expect(self, sequence: Sequence) -> None:
        self._prefixes.expect(sequence)
        self._compile(sequence)

    def is_fetching(self, request_id: str) -> bool:
        return self._is_compiling(request_id) or self._prefixes.is_fetching(request_id)

    def collect(self) -> tuple[str, ...]:
        compiled = tuple(request_id for request_id in self._compiling if not self._is_compiling(request_id))
        for request_id in compiled:
            del self._compiling[request_id]
        return (*self._prefixes.collect(), *compiled)

    def forget(self, request_id: str) -> None:
        self._compiling.pop(request_id, None)
        self._prefixes.forget(request_id)

    def num_fetched_tokens(self, request_id: str) -> int:
        return self._prefixes.num_fetched_tokens(request_id)

    def _is_compiling(self, request_id: str) -> bool:
        return request_id in self._compiling and not self._compiling[request_id].done()

    def _compile(self, sequence: Sequence) -> None:
        if sequence.request.sampling.grammar is None:
            return
        compiled = self._grammars.begin(sequence.request.sampling)
        if not compiled.done():
            self._compiling[sequence.request_id] = compiled
            compiled.add_done_callback(lambda _: self._wake())
