"""The store as the engine uses it: every call returns at once, and answers later by callback.

    get/put/exists/touch/discard -> the group's node -> that node's thread -> answers, or at the deadline misses

Nothing here raises for what a node does or does not do: a dead, slow or lying node gives misses, and they are counted.

Callbacks run on threads of the store, or within `cancel`; they must do no more than put the news in a queue. `on_done`
comes exactly once for each call, and `on_key` not after it. Buffers of a get are not touched once `on_done` was called.
Buffers of a put may still be read then, should a node have been given up in the middle; a record torn so is a miss.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from epd.cache.l3.base import Buffer, Placement, StoreNode, StoreStats
from epd.cache.l3.jobs import DiscardJob, ExistsJob, GetJob, Job, OnDone, OnKey, PutJob, TouchJob
from epd.cache.l3.node_thread import NodeThread

__all__ = ["StoreClient"]

logger = logging.getLogger(__name__)

_PUT_PATIENCE_S: Final = 10.0
_MAX_PUT_BYTES: Final = 64 << 20


class StoreClient:
    """Owns the nodes and their threads. Any thread may call it."""

    def __init__(
        self,
        nodes: Sequence[StoreNode],
        *,
        placement: Placement | None = None,
        io_bytes: int = 1 << 20,
        timeout_s: float = 0.05,
        max_put_bytes: int = _MAX_PUT_BYTES,
        value_bytes: Callable[[bytes], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`placement` may be left out for a single node.

        `io_bytes` is what one call of a node moves at most, and the size of slices: processes that share a store agree
        on it. `timeout_s` bounds such a call. Puts that find `max_put_bytes` waiting for their node are dropped.
        `value_bytes` tells the size of a key's value to `exists`, `touch` and `discard`; without it every value has to
        fit in one slice. `clock` is that of all deadlines.
        """
        if not nodes or (placement is None and len(nodes) > 1):
            raise ValueError(f"{len(nodes)} nodes need {'a placement' if nodes else 'to be one at least'}")
        if io_bytes < 1 or timeout_s <= 0:
            raise ValueError(f"io_bytes is {io_bytes} and timeout_s {timeout_s}; allowed: more than 0")
        self._placement = placement
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._num_begun = 0
        self._num_ended = 0
        self._counters: Counter[str] = Counter()
        self._is_closed = False
        self._keeper = _Keeper(clock)
        self._threads = [
            NodeThread(
                node,
                io_bytes=io_bytes,
                timeout_s=timeout_s,
                max_put_bytes=max_put_bytes,
                value_bytes=value_bytes,
                clock=clock,
            )
            for node in nodes
        ]
        self._by_name = {thread.name: thread for thread in self._threads}

    def get(
        self,
        group: str,
        items: Sequence[tuple[bytes, Sequence[memoryview]]],
        *,
        deadline_s: float,
        on_key: OnKey | None = None,
        on_done: OnDone,
    ) -> Callable[[], None]:
        """Fill each item's buffers with its value. True for those that hold exactly what was put.

        Others hold anything. Returns what ends the call early: afterwards `on_done` has been called.
        """
        job = GetJob(items, on_key, self._counting(on_done, "hits", "misses"), deadline_s)
        return self._begin(self._thread_of(group), job)

    def put(
        self, group: str, items: Sequence[tuple[bytes, Sequence[Buffer]]], on_done: OnDone | None = None
    ) -> Callable[[], None]:
        """Keep each item's pieces as its value; they may not change before `on_done`. True for those that are kept."""
        thread = self._thread_of(group)

        def done(answers: tuple[bool, ...]) -> None:
            if thread is not None:
                thread.count_puts(sum(answers), len(answers) - sum(answers))
            if on_done is not None:
                on_done(answers)

        job = PutJob(items, self._counting(done, "puts", "unkept"), self._clock() + _PUT_PATIENCE_S)
        return self._begin(thread, job)

    def exists(self, group: str, keys: Sequence[bytes], *, deadline_s: float, on_done: OnDone) -> Callable[[], None]:
        """Which are there: no promise that a get will find them."""
        return self._begin(self._thread_of(group), ExistsJob(keys, self._counting(on_done), deadline_s))

    def touch(self, group: str, keys: Sequence[bytes]) -> None:
        """Count them as just used, if there is time for it."""
        thread = self._thread_of(group)
        if thread is not None:
            thread.submit(TouchJob(keys, self._clock() + _PUT_PATIENCE_S))

    def discard(self, group: str, keys: Sequence[bytes]) -> None:
        """Forget them wherever they are: no get that begins later finds them, unless they are put again.

        A node that cannot do it now does it when it works again; this process takes its records for missing until then.
        """
        del group
        for thread in self._threads:
            thread.submit(DiscardJob(keys))

    def place(self, group: str) -> str:
        """The name of the node that the group's pages go to now; empty while none works."""
        thread = self._thread_of(group)
        return "" if thread is None else thread.name

    def stats(self) -> StoreStats:
        nodes = tuple(thread.stats() for thread in self._threads)
        total: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        for thread, node in zip(self._threads, nodes, strict=True):
            total.update(node.counters)
            for kind, spent_s in list(thread.seconds.items()):
                seconds[kind] = seconds.get(kind, 0.0) + spent_s
        with self._lock:
            counters = dict(self._counters)
        return StoreStats(
            hits=counters.get("hits", 0),
            misses=counters.get("misses", 0),
            puts=counters.get("puts", 0),
            unkept=counters.get("unkept", 0),
            dropped=total["dropped"],
            corrupt=total["corrupt"],
            timeouts=total["timeouts"] + self._keeper.num_expired,
            failures=total["failures"],
            get_bytes=total["get_bytes"],
            put_bytes=total["put_bytes"],
            seconds=seconds,
            nodes=nodes,
        )

    @property
    def num_under_way(self) -> int:
        """Calls whose `on_done` is still to come."""
        with self._lock:
            return self._num_begun - self._num_ended

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        with self._lock:
            assert 0 <= self._num_ended <= self._num_begun, f"{self._num_ended} of {self._num_begun} calls have ended"
        for thread in self._threads:
            thread.check()

    def close(self, flush_s: float = 1.0) -> None:
        """Write what waits for `flush_s` at most. Every call has ended afterwards; later ones end as misses."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        by_s = self._clock() + flush_s
        for thread in self._threads:
            thread.begin_close(by_s)
        for thread in self._threads:
            # A call that is under way may take its time limit, and twice that for a node that is late.
            if not thread.finish_close(max(0.0, by_s - self._clock()) + 3 * self._timeout_s + 1.0):
                logger.warning("the KV store's node %s did not come back and is left behind", thread.name)
        self._keeper.close()

    def _thread_of(self, group: str) -> NodeThread | None:
        """The group's node or, while that does not work, the one to take its place."""
        if self._placement is None:
            return self._threads[0]
        names = self._placement.order(group)
        return next((self._by_name[name] for name in names if self._by_name[name].is_usable), None)

    def _begin(self, thread: NodeThread | None, job: Job) -> Callable[[], None]:
        with self._lock:
            self._num_begun += 1
        if thread is None or not job.num_keys or not thread.submit(job):
            # By another thread: a caller is not called back before his call returned.
            job.deadline_s = 0.0
            self._keeper.end_soon(job)
        else:
            self._keeper.watch(job)

        def cancel() -> None:
            job.end()

        return cancel

    def _counting(self, on_done: OnDone | None, yes: str | None = None, no: str | None = None) -> OnDone:
        def done(answers: tuple[bool, ...]) -> None:
            with self._lock:
                self._num_ended += 1
                if yes is not None and no is not None:
                    num_yes = sum(answers)
                    self._counters[yes] += num_yes
                    self._counters[no] += len(answers) - num_yes
            if on_done is not None:
                on_done(answers)

        return done


class _Keeper:
    """The thread that ends jobs at their deadlines, whatever their nodes do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._deadlines: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._is_closed = False
        self.num_expired = 0
        self._thread = threading.Thread(target=self._run, name="kv-store deadlines", daemon=True)
        self._thread.start()

    def watch(self, job: Job) -> None:
        """End it at its deadline."""
        with self._changed:
            is_first = not self._deadlines or job.deadline_s < self._deadlines[0][0]
            heapq.heappush(self._deadlines, (job.deadline_s, next(self._numbers), job))
            if is_first:
                self._changed.notify()
            is_closed = self._is_closed
        if is_closed:
            job.end()

    def end_soon(self, job: Job) -> None:
        """It was never begun."""
        self.watch(job)

    def close(self) -> None:
        """Ends what is left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and not self._is_due():
                    first_s = self._deadlines[0][0] - self._clock() if self._deadlines else None
                    self._changed.wait(first_s)
                if self._is_closed:
                    jobs = [job for _, _, job in self._deadlines]
                    self._deadlines.clear()
                else:
                    jobs = [heapq.heappop(self._deadlines)[2]]
            for job in jobs:
                self._end(job)
            if self._is_closed:
                return

    def _is_due(self) -> bool:
        while self._deadlines and self._deadlines[0][2].has_ended:
            heapq.heappop(self._deadlines)
        return bool(self._deadlines) and self._deadlines[0][0] <= self._clock()

    def _end(self, job: Job) -> None:
        was_begun = job.deadline_s > 0
        try:
            if job.end() and was_begun:
                self.num_expired += 1
        except Exception:
            logger.exception("a callback of the KV store failed")
