"""How many requests one client may make: a bucket of tokens for each, and places for what it has in flight.

A bucket holds as many as may come in one burst and fills at the rate of the limit (token bucket; Turner 1986, as in
ATM's generic cell rate algorithm). A client is an API key or, where none are in use, an address.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from epd.errors import TooManyRequests

# Clients that are remembered; of more, those that were silent for longest begin anew with a full bucket.
_MAX_CLIENTS = 10_000


@dataclass(slots=True)
class _Client:
    """`level` requests may come now, as of `seen_s`."""

    level: float
    seen_s: float
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
            if client.level < 1:
                raise TooManyRequests(
                    f"more than {self._per_minute} requests a minute (gateway.requests_per_minute); allowed: "
                    f"that many, {self._burst} at once",
                    retry_after_s=(1 - client.level) * 60 / self._per_minute,
                    limit=self._per_minute,
                    reset_s=(self._burst - client.level) * 60 / self._per_minute,
                )
            client.level -= 1
        client.num_inflight += 1
        try:
            yield self._headers(client)
        finally:
            client.num_inflight -= 1

    def _client(self, name: str) -> _Client:
        now_s = self._clock()
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(self._burst, now_s)
            self._forget()
        client.level = min(self._burst, client.level + (now_s - client.seen_s) * self._per_minute / 60)
        client.seen_s = now_s
        self._clients.move_to_end(name)
        return client

    def _forget(self) -> None:
        """Those silent for longest, but for clients with something in flight: their places would be lost."""
        for name in list(self._clients):
            if len(self._clients) <= _MAX_CLIENTS:
                return
            if not self._clients[name].num_inflight:
                del self._clients[name]

    def _headers(self, client: _Client) -> Mapping[str, str]:
        """OpenAI's names; `reset` is when the bucket is full again."""
        if not self._per_minute:
            return {}
        full_in_s = (self._burst - client.level) * 60 / self._per_minute
        return {
            "X-RateLimit-Limit-Requests": str(self._per_minute),
            "X-RateLimit-Remaining-Requests": str(math.floor(client.level)),
            "X-RateLimit-Reset-Requests": f"{full_in_s:.3f}s",
        }
