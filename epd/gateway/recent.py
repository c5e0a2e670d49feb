"""The last requests that ended, for the page and `GET /v1/pipeline`: a bounded ring of receipts.

A receipt holds counts and times, and neither text nor media of the request, so nothing a client said is kept here.
Everything runs on one asyncio loop.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epd.gateway.receipt import Receipt

DEFAULT_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """`sequence` counts the requests of this gateway from 1. `owner` stands for the API key the request came with; it
    is empty where no keys are in use."""

    sequence: int
    owner: str
    receipt: Receipt

    def to_json(self) -> dict[str, Any]:
        return {"sequence": self.sequence, **self.receipt.to_json()}


class RecentRequests:
    """Keeps the last `capacity` receipts, oldest first."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of recent requests is {capacity}; it must be positive")
        self._ring: deque[RecentRequest] = deque(maxlen=capacity)
        self._num_added = 0

    @property
    def num_added(self) -> int:
        """All requests ever told, which is also the sequence of the last one."""
        return self._num_added

    def add(self, receipt: Receipt, *, owner: str = "") -> None:
        self._num_added += 1
        self._ring.append(RecentRequest(self._num_added, owner, receipt))

    def of_owner(self, owner: str, *, after: int = 0) -> Iterator[RecentRequest]:
        """The requests of one owner with a sequence beyond `after`, oldest first."""
        return (entry for entry in self._ring if entry.sequence > after and entry.owner == owner)
