"""Cached prefixes on their way from the store to the host, for requests in line.

    submit --begin--> fetching --all there, or out of time--> in line for pages --admitted--> forgotten
                         |                                        (the host keeps what came until then)
                         +--ended, aborted----------------------------------------------------^

A store that is slow costs its own requests a bounded wait, and nothing else: what has not come by then is computed.
"""

from __future__ import annotations

from typing import Protocol

from epd.engine.sequence import Sequence

__all__ = ["NO_STORE", "PrefixSupply"]


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

    def fetched_tokens(self, request_id: str) -> tuple[int, int]:
        """Tokens `[start, stop)` of the prompt that came from the store for this request."""
        ...


class _NoStore:
    def begin(self, sequence: Sequence) -> None:
        """There is nothing to fetch."""

    def is_fetching(self, request_id: str) -> bool:
        return False

    def collect(self) -> tuple[str, ...]:
        return ()

    def forget(self, request_id: str) -> None:
        """Nothing is known of anyone."""

    def fetched_tokens(self, request_id: str) -> tuple[int, int]:
        return 0, 0


NO_STORE: PrefixSupply = _NoStore()
"""The supply of a worker without a store."""
