"""What may happen a thousand times a second is said once a minute, and how often it was not said."""

import time
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 60.0


class Seldom:
    """At most one line a period. One thread at a time; two at once may say one line too many."""

    def __init__(self, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._said_s: float | None = None
        self._num_unsaid = 0

    def due(self) -> str | None:
        """What to add to a line that is to be said now, "" or " (and N more since the last such line)"; None when it is
        not to be said."""
        now_s = self._clock()
        if self._said_s is not None and now_s - self._said_s < self._period_s:
            self._num_unsaid += 1
            return None
        self._said_s, num_unsaid, self._num_unsaid = now_s, self._num_unsaid, 0
        return f" (and {num_unsaid} more since the last such line)" if num_unsaid else ""
