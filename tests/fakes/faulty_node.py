"""A node of the KV store behind which something is wrong: a real one whose calls are slow, refused or answered falsely.

What it does is drawn from its own source of chance, and counted in `injected` by kind:

    slow       a call takes longer than its limit, and is done all the same
    late       a call says so when its limit is over, and may be done or not
    failing    a call is refused
    missing    a value that is there is not given, so that runs of pages have holes
    corrupt    a value is given with a bit changed, cut short, grown, emptied, or as zeros
    stale      a value is given that was put under another key, or a slice of one that was put before
    full       a put keeps nothing, or is refused
    lying      `exists` says yes of everything
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epd.cache.l3.base import Buffer, NodeFailed, NodeTimedOut, NodeUsage, Sink, StoreNode, Tended
from epd.cache.l3.record import pack

__all__ = ["FaultyNode", "Troubles"]

_KEPT_VALUES = 64


@dataclass(frozen=True, slots=True)
class Troubles:
    """How likely each is: `missing`, `corrupt` and `stale` for each value, the others for each call."""

    slow: float = 0.0
    late: float = 0.0
    failing: float = 0.0
    missing: float = 0.0
    corrupt: float = 0.0
    stale: float = 0.0
    full: float = 0.0
    lying: float = 0.0


class FaultyNode:
    """See epd.cache.l3.base.StoreNode. `heal` ends the trouble; `kill` makes every call fail from then on."""

    def __init__(self, inner: StoreNode, troubles: Troubles, rng: random.Random, *, io_bytes: int) -> None:
        """`io_bytes`: the size of slices, to make up one that was put before."""
        self.injected: Counter[str] = Counter()
        self.num_damaged_values = 0
        """Values of which something damaged was handed over before anything else was wrong with them."""
        self._inner = inner
        self._troubles = troubles
        self._rng = rng
        self._io_bytes = io_bytes
        self._is_dead = False
        # Records as they were put, to give them under another name.
        self._seen: dict[bytes, bytes] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def heal(self) -> None:
        self._troubles = Troubles()

    def kill(self) -> None:
        self._is_dead = True

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        self._trouble(timeout_s)
        spoiled: set[bytes] = set()

        def give(position: int, record: memoryview | None) -> None:
            key = keys[position]
            if record is None:
                spoiled.add(_value_of(key))
                sink(position, None)
                return
            given = self._falsify(key, bytes(record))
            if given is None:
                self.injected["missing"] += 1
                spoiled.add(_value_of(key))
                sink(position, None)
            elif given == record:
                sink(position, record)
            else:
                # A client looks no further into a value once something is wrong with it.
                self.num_damaged_values += _value_of(key) not in spoiled
                spoiled.add(_value_of(key))
                sink(position, memoryview(given))

        self._inner.get(keys, give, timeout_s=timeout_s)

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        self._trouble(timeout_s)
        if self._happens("full"):
            if self._rng.random() < 0.5:
                raise NodeFailed("no space left on device")
            return [False] * len(items)
        for key, pieces in items:
            if len(self._seen) < _KEPT_VALUES:
                self._seen[key] = b"".join(bytes(piece) for piece in pieces)
        return self._inner.put(items, timeout_s=timeout_s)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        self._trouble(timeout_s)
        found = self._inner.exists(keys, timeout_s=timeout_s)
        return [True] * len(keys) if self._happens("lying") else found

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self._trouble(timeout_s)
        self._inner.touch(keys, timeout_s=timeout_s)

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        self._trouble(timeout_s)
        self._inner.discard(keys, timeout_s=timeout_s)

    def tend(self) -> bool:
        return isinstance(self._inner, Tended) and self._inner.tend()

    def usage(self) -> NodeUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def _happens(self, kind: str) -> bool:
        happens = bool(self._rng.random() < getattr(self._troubles, kind))
        self.injected[kind] += happens
        return happens

    def _trouble(self, timeout_s: float) -> None:
        """What may befall any call before it does anything."""
        if self._is_dead:
            raise NodeFailed("it was killed")
        if self._happens("failing"):
            raise NodeFailed("something is wrong with it")
        if self._happens("late"):
            time.sleep(timeout_s)
            raise NodeTimedOut("no answer in time")
        if self._happens("slow"):
            time.sleep(1.5 * timeout_s)

    def _falsify(self, key: bytes, record: bytes) -> bytes | None:
        """What is given instead of a record; None when it is not given."""
        if self._rng.random() < self._troubles.missing:
            return None
        if self._happens("corrupt"):
            return _damage(record, self._rng)
        if self._happens("stale"):
            return self._other(key, record)
        return record

    def _other(self, key: bytes, record: bytes) -> bytes:
        """Another key's record or, of a value in slices, what an earlier put would have left in a slice."""
        if _value_of(key) != key:
            index = int(key.rpartition(b"/")[2])
            size_bytes = int.from_bytes(record[8:16], "little")
            earlier = self._rng.randbytes(size_bytes)
            slices = dict(pack(_value_of(key), [memoryview(earlier)], self._io_bytes))
            assert len(slices) > index
            return b"".join(bytes(piece) for piece in slices[key])
        others = [other for name, other in self._seen.items() if name != key]
        return self._rng.choice(others) if others else b""


def _damage(record: bytes, rng: random.Random) -> bytes:
    """Something else, whatever it is."""
    match rng.randrange(5):
        case 0:
            at = rng.randrange(len(record))
            return record[:at] + bytes([record[at] ^ (1 << rng.randrange(8))]) + record[at + 1 :]
        case 1:
            return record[: rng.randrange(len(record))]
        case 2:
            return record + rng.randbytes(rng.choice((1, 8, 4096)))
        case 3:
            return b""
        case _:
            at = rng.randrange(len(record))
            return record[:at] + b"\0" * (len(record) - at) if any(record[at:]) else b""


def _value_of(name: bytes) -> bytes:
    """Key of the value that a node keeps under `name`, whole or in slices (see epd.cache.l3.record.slice_key)."""
    stem, mark, number = name.rpartition(b"/")
    return stem if mark and len(stem) >= 17 and number.isdigit() else name
