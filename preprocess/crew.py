"""A crew of threads that all media of a process share for decoding beside their own thread.

Whoever has work runs it in the calling thread; the crew's threads join in while they are free. Work that no crew thread
has begun by the time its result is wanted is done by the thread that wants it. So nothing ever waits for a free thread,
a crew that is busy elsewhere only costs speed, and crews cannot deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """One call that a crew thread may take over until somebody wants its result."""

    def __init__(self, call: Callable[[], T], future: Future[T] | None) -> None:
        self._call = call
        self._future = future
        self._lock = threading.Lock()

    def result(self) -> T:
        """What the call returns or raises. Runs it here if no other thread has begun it.

        A result is kept; a call that raised here runs again when asked again.
        """
        with self._lock:
            if self._future is None or self._future.cancel():
                value = self._call()
                self._future = Future()
                self._future.set_result(value)
        return self._future.result()

    def join(self) -> BaseException | None:
        """Makes sure that the call is not running and will not begin; waits if it has begun. Returns what it raised."""
        if self._future is None or self._future.cancel():
            return None
        return self._future.exception()


class Crew:
    """`num_threads` threads that take errands in the order they were given. Close it with `close`."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 0:
            raise ValueError(f"num_threads is {num_threads}, allowed is 0 or more")
        self.num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="crew") if num_threads else None

    def start(self, call: Callable[[], T]) -> Errand[T]:
        """Lets a crew thread take the call."""
        return Errand(call, self._threads.submit(call) if self._threads is not None else None)

    def close(self) -> None:
        """Drops errands that have not begun and waits for the others."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


NO_CREW = Crew(0)
"""The calling thread alone."""


class Teamwork:
    """Workers of one job, of which all stop when one fails."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def run(self, crew: Crew, work: Callable[[], None], *, num_workers: int) -> None:
        """Runs `work` in this thread and in up to `num_workers - 1` of the crew's; returns when all have returned.

        `work` must take its tasks from a shared list, so that one worker does everything if no other joins, and must
        return soon once `stop` is set. Raises this thread's error, else the first of the others'.
        """
        errands = [crew.start(lambda: self._run_one(work)) for _ in range(min(num_workers - 1, crew.num_threads))]
        errors: list[BaseException | None] = []
        try:
            self._run_one(work)
        finally:
            errors.extend(errand.join() for errand in errands)
        for error in errors:
            if error is not None:
                raise error

    def _run_one(self, work: Callable[[], None]) -> None:
        finished = False
        try:
            work()
            finished = True
        finally:
            if not finished:
                self.stop.set()
