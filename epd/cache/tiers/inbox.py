"""News of other threads, acted on by the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Inbox"]

News = Callable[[], None]


class Inbox:
    """Any thread posts; `empty` runs what was posted, in order, on the thread that calls it."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called by the posting thread, once for all news until `empty`."""
        self._wake = wake
        self._lock = threading.Lock()
        self._news: deque[News] = deque()
        self._woken = False
        self._has_news = threading.Event()

    def post(self, news: News, *, wakes: bool = True) -> None:
        """`wakes` False: it can wait until somebody looks, or something else wakes."""
        with self._lock:
            self._news.append(news)
            wakes = wakes and not self._woken
            if wakes:
                self._woken = True
                self._has_news.set()
        if wakes and self._wake is not None:
            self._wake()

    def empty(self) -> int:
        """Runs what is there now, and says how much it was; what comes meanwhile is for the next time."""
        with self._lock:
            news, self._news, self._woken = self._news, deque(), False
            self._has_news.clear()
        for item in news:
            item()
        return len(news)

    def wait(self, timeout_s: float) -> bool:
        """Whether there is news that wakes, after so long at most."""
        return self._has_news.wait(timeout_s)
