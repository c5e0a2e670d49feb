"""What the log says of things that may happen to every page: at once the first time, then now and then, with counts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["NodeNotices", "Notice"]

logger = logging.getLogger(__name__)

_UNKEPT_EVERY_S: Final = 60.0
_DAMAGED_EVERY_S: Final = 10.0


class Notice:
    """One kind of line; any thread may add to it."""

    def __init__(self, words: str, *, every_s: float, clock: Callable[[], float]) -> None:
        """`words` are filled with the count since the last line and the reason of the last that was counted."""
        self._words = words
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._why = ""
        self._due_s: float | None = None

    def add(self, count: int, why: str = "") -> None:
        """Writes a line if one is due."""
        with self._lock:
            self._count += count
            self._why = why
        self.tell()

    def tell(self, *, at_the_end: bool = False) -> None:
        """Write what was counted since the last line, if that is long enough ago."""
        with self._lock:
            now_s = self._clock()
            if not self._count or (not at_the_end and self._due_s is not None and now_s < self._due_s):
                return
            count, self._count, self._due_s = self._count, 0, now_s + self._every_s
            why = self._why
        logger.warning(self._words, {"count": f"{count:,}", "why": why})


class NodeNotices:
    """Those of one node."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        node = f"the KV store's node {name}".replace("%", "%%")

        def notice(words: str, every_s: float) -> Notice:
            return Notice(f"{node} {words}", every_s=every_s, clock=clock)

        self.refused = notice("does not keep what it is given (%(count)s pages): %(why)s", _UNKEPT_EVERY_S)
        self.dropped = notice("is not given all there is (%(count)s pages): %(why)s", _UNKEPT_EVERY_S)
        self.damaged = notice("gave damaged records, which are removed (%(count)s)", _DAMAGED_EVERY_S)

    def tell(self, *, at_the_end: bool = False) -> None:
        """Lines that have become due."""
        for notice in (self.refused, self.dropped, self.damaged):
            notice.tell(at_the_end=at_the_end)
