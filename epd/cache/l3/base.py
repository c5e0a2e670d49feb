"""What a place for KV pages must be able to do, and what the store says about itself.

A node keeps short byte strings by key and looks into none of them: that a value is what was put is for
`epd.cache.l3.record` to say. Nodes block; `epd.cache.l3.client` gives each a thread of its own, so that nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

__all__ = [
    "BreakerState",
    "Buffer",
    "Explaining",
    "NodeFailed",
    "NodeStats",
    "NodeTimedOut",
    "NodeUsage",
    "Placement",
    "Sink",
    "StoreNode",
    "StoreStats",
    "Tended",
]

Buffer = bytes | bytearray | memoryview

# Called once per key at most, with the key's index and its value, or None for a miss. The view dies with the call.
Sink = Callable[[int, memoryview | None], None]

BreakerState = Literal["closed", "open", "half_open"]


class NodeFailed(Exception):
    """The node could not do it: a server that is gone, a disk that refuses. Says what, without passwords."""


class NodeTimedOut(NodeFailed):
    """It did not answer within the time given."""


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """What a node holds; None where it cannot tell. `counters` are since the start, by a name of the node's own."""

    num_records: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


class StoreNode(Protocol):
    """One place. Blocking, and called by one thread only (`usage` and `close` may come from another).

    `timeout_s` is for the whole call; a node that cannot keep to it is given up by its client, but not interrupted.
    Every method but `close` raises NodeFailed (NodeTimedOut for lack of an answer) and nothing else.
    """

    @property
    def name(self) -> str:
        """For people and for placement: the same in all processes, without passwords."""
        ...

    def get(self, keys: Sequence[bytes], sink: Sink, *, timeout_s: float) -> None:
        """Give each key's value to `sink`, in any order. After NodeFailed, keys that were not given are misses."""
        ...

    def put(self, items: Sequence[tuple[bytes, Sequence[Buffer]]], *, timeout_s: float) -> Sequence[bool]:
        """Keep each key's pieces as one value, in this order, in place of what was there. True for each that is kept.

        What is kept is there, until evicted or discarded, whoever dies after the return.
        """
        ...

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> Sequence[bool]:
        """Whether each is there now: no promise, and no use of it."""
        ...

    def touch(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """Count them as just used, those that are there."""
        ...

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """Forget them, those that are there."""
        ...

    def usage(self) -> NodeUsage:
        """Cheap: called for each scrape of the metrics."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Explaining(Protocol):
    """A node that can say why it does not keep what it is given."""

    @property
    def why_unkept(self) -> str:
        """Of the last value that was not kept, without passwords; empty when it does not know."""
        ...


@runtime_checkable
class Tended(Protocol):
    """A node with housekeeping of its own."""

    def tend(self) -> bool:
        """Do a little of it, some milliseconds' worth; called by the node's thread when no call waits.

        True when there is more to do at once. Raises NodeFailed.
        """
        ...


class Placement(Protocol):
    """Which node keeps a group's pages."""

    def order(self, group: str) -> Iterator[str]:
        """Names of all nodes, the group's own first, then those to take its place. Pure and cheap."""
        ...


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Of one node, since the start. Keys of a call that was never made, the breaker being open, count as `skipped`.

    Of values to be put, `kept` and `unkept` in `counters` are all; of the unkept, the node did not take those that are
    `refused`, and those that are `dropped` found too many waiting. The others were lost to its failures.
    """

    name: str
    breaker: BreakerState
    num_waiting: int
    usage: NodeUsage
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Since the start, over all nodes; `seconds` are those the nodes' threads spent in calls, by kind of call."""

    hits: int
    misses: int
    puts: int
    unkept: int
    dropped: int
    corrupt: int
    timeouts: int
    failures: int
    get_bytes: int
    put_bytes: int
    seconds: Mapping[str, float]
    nodes: tuple[NodeStats, ...]
