"""Whether a node is to be used, or left alone after failures in a row.

    closed --failures in a row--> open --pause over--> half_open --the probe works--> closed
                                    ^------the probe fails, pause doubled------'

While it is not closed nobody but the probe calls the node, and the probe is nobody's request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from epd.cache.l3.base import BreakerState

__all__ = ["Breaker"]

logger = logging.getLogger(__name__)

_FAILURES_IN_A_ROW: Final = 2
_FIRST_PAUSE_S: Final = 0.25
# A server that is back is in use within twice this, should the first probe find it busy.
_LONGEST_PAUSE_S: Final = 5.0


class Breaker:
    """Of one node; may be asked and told by any thread."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        *,
        failures_in_a_row: int = _FAILURES_IN_A_ROW,
        first_pause_s: float = _FIRST_PAUSE_S,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        """`name` for the log; `clock` gives seconds that only grow."""
        self._name = name
        self._clock = clock
        self._failures_in_a_row = failures_in_a_row
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._lock = threading.Lock()
        self._num_failures = 0
        self._pause_s = first_pause_s
        self._open_until_s = 0.0
        self.state: BreakerState = "closed"
        self.num_openings = 0

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    @property
    def seconds_to_probe(self) -> float | None:
        """Until `probes` may say yes; None while closed."""
        return None if self.state == "closed" else max(0.0, self._open_until_s - self._clock())

    def probes(self) -> bool:
        """Whether the caller is to try the node now, and to tell how that went."""
        with self._lock:
            if self.state != "open" or self._clock() < self._open_until_s:
                return False
            self.state = "half_open"
            return True

    def failed(self, why: str) -> None:
        """A call did. A probe's failure counts for as many as it takes."""
        with self._lock:
            self._num_failures += 1
            if self.state == "half_open" or (self.state == "closed" and self._num_failures >= self._failures_in_a_row):
                self._open(why)

    def trip(self, why: str) -> None:
        """Open now, whatever was counted: a call has not come back."""
        with self._lock:
            if self.state == "closed":
                self._open(why)

    def worked(self) -> None:
        """A call did. What was under way when it opened does not close it; a probe does."""
        with self._lock:
            if self.state == "open":
                return
            if self.state == "half_open":
                logger.warning("the KV store's node %s works again", self._name)
            self.state = "closed"
            self._num_failures, self._pause_s = 0, self._first_pause_s

    def _open(self, why: str) -> None:
        if self.state == "closed":
            self.num_openings += 1
            logger.warning("the KV store's node %s is left alone: %s", self._name, why)
        self.state = "open"
        self._open_until_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
