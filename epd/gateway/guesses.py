"""Wrong API keys, by address: after many of them each further try waits for its turn, so that keys cannot be guessed at
speed.

A key that was right from an address before is looked at there at once, whatever others behind it try. Any other key
waits like a guess, the right one as well: an answer that came sooner would tell which it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from epd.errors import InvalidApiKey, TooManyRequests
from epd.gateway.bucket import Bucket
from epd.gateway.keys import ApiKeys

# Failures that an address may have at once, and how many of them it is forgiven in a minute.
FREE_FAILURES = 60
_PER_MINUTE = 60
# Tries of one address that wait; of more it is not looked at whether they are right.
_MAX_WAITING = 30
# What is remembered at most: addresses, and keys that were right there.
_MAX_REMEMBERED = 10_000


class Guesses:
    """Looks at keys, for one gateway."""

    def __init__(
        self,
        keys: ApiKeys,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`clock` is monotonic seconds."""
        self._keys = keys
        self._clock = clock
        self._sleep = sleep
        self._addresses: OrderedDict[str, Bucket] = OrderedDict()
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    async def check(self, candidate: bytes, remote: str) -> None:
        """Raises InvalidApiKey; TooManyRequests where it was one of many."""
        if not candidate:
            raise _invalid()
        place = _place(remote)
        pair = place, hashlib.sha256(candidate).digest()
        if pair in self._known:
            if self._keys.accepts(candidate):
                self._known.move_to_end(pair)
                return
            # The key is a right one no more.
            del self._known[pair]
        failures = self._failures(place)
        failures.level -= 1
        is_one_of_many = failures.level < 0
        if is_one_of_many:
            wait_s = failures.seconds_until(0)
            if -failures.level > _MAX_WAITING:
                failures.level += 1
                raise _too_many(wait_s)
            await self._sleep(wait_s)
        if not self._keys.accepts(candidate):
            raise _too_many(60 / _PER_MINUTE) if is_one_of_many else _invalid()
        failures.level += 1
        self._known[pair] = None
        if len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)

    def _failures(self, place: str) -> Bucket:
        """How many may come from there now; where it is in debt the next waits."""
        now_s = self._clock()
        failures = self._addresses.setdefault(place, Bucket.full(FREE_FAILURES, _PER_MINUTE, now_s))
        self._addresses.move_to_end(place)
        if len(self._addresses) > _MAX_REMEMBERED:
            self._addresses.popitem(last=False)
        failures.fill(now_s)
        return failures


def _place(remote: str) -> str:
    """The address; of version 6 the network, of which one host has every address."""
    try:
        found = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def _invalid() -> InvalidApiKey:
    return InvalidApiKey("missing or wrong API key; send it as: Authorization: Bearer KEY")


def _too_many(retry_after_s: float) -> TooManyRequests:
    return TooManyRequests(
        f"too many wrong API keys from this address; allowed: {FREE_FAILURES}, and {_PER_MINUTE} more a minute",
        retry_after_s=retry_after_s,
        limit=_PER_MINUTE,
        reset_s=retry_after_s,
    )
