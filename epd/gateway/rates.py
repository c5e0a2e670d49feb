"""How many requests one client may make: a bucket of tokens for each, and places for what it has in flight.

A client is an API key or, where none are in use, an address.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from epd.errors import TooManyRequests
from epd.gateway.bucket import Bucket

# Clients that are remembered; of more, those that were silent for longest begin anew with a full bucket.
_MAX_CLIENTS = 10_000


@dataclass(slots=True)
class _Client:
    bucket: Bucket
    num_inflight: int = 0


class RateLimiter:
    """Of one gateway. A limit of 0 is none."""

    def __init__(self, *, per_minute: int, burst: int, max_inflight: int, clock: Callable[[], float]) -> None:
        """`burst`: requests at once, after a pause; 0 for as many as a minute allows. `clock` is monotonic seconds."""
        self._per_minute = per_minute
        self._burst = burst or per_minute
        self._max_inflight = max_inflight
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return bool(self._per_minute or self._max_inflight)

    @contextmanager
    def place(self, name: str) -> Iterator[Mapping[str, str]]:
        """A request of this client, from here to its end; the headers that tell the client where it stands.

        Raises TooManyRequests with the seconds after which one may come; a refused one costs nothing.
        """
        client = self._client(name)
        if self._max_inflight and client.num_inflight >= self._max_inflight:
            raise TooManyRequests(
                f"{client.num_inflight} requests of this client are in flight; allowed: {self._max_inflight} "
                "(gateway.max_inflight_per_client)",
                retry_after_s=1.0,
                limit=self._max_inflight,
                reset_s=1.0,
            )
        if self._per_minute:
            bucket = client.bucket
            if bucket.level < 1:
                raise TooManyRequests(
                    f"more than {self._per_minute} requests a minute (gateway.requests_per_minute); allowed: "
                    f"that many, {self._burst} at once",
                    retry_after_s=bucket.seconds_until(1),
                    limit=self._per_minute,
                    reset_s=bucket.seconds_until(self._burst),
                )
            bucket.level -= 1
        client.num_inflight += 1
        try:
            yield self._headers(client.bucket)
        finally:
            client.num_inflight -= 1

    def _client(self, name: str) -> _Client:
        now_s = self._clock()
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(Bucket.full(self._burst, self._per_minute, now_s))
            self._forget()
        client.bucket.fill(now_s)
        self._clients.move_to_end(name)
        return client

    def _forget(self) -> None:
        """Those silent for longest, but for clients with something in flight: their places would be lost."""
        for name in list(self._clients):
            if len(self._clients) <= _MAX_CLIENTS:
                return
            if not self._clients[name].num_inflight:
                del self._clients[name]

    def _headers(self, bucket: Bucket) -> Mapping[str, str]:
        """OpenAI's names; `reset` is when the bucket is full again."""
        if not self._per_minute:
            return {}
        return {
            "X-RateLimit-Limit-Requests": str(self._per_minute),
            "X-RateLimit-Remaining-Requests": str(math.floor(bucket.level)),
            "X-RateLimit-Reset-Requests": f"{bucket.seconds_until(self._burst):.3f}s",
        }
