"""The thread of one node: takes jobs in turn, one call of at most `io_bytes` at a time, and lets nobody wait for a node
that does not answer.

What a request waits for (get, exists, discard) goes first; puts and touches follow in the order they came, and let the
others pass between two calls. A failure ends the job it happened in; with the breaker open, all jobs end at once.

A discard that the node could not do is remembered: until it is done, or the key is written anew, the key is a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from epd.cache.l3.base import Explaining, NodeFailed, NodeStats, NodeTimedOut, NodeUsage, StoreNode, Tended
from epd.cache.l3.breaker import Breaker
from epd.cache.l3.jobs import DiscardJob, ExistsJob, GetJob, Job, PutJob, TouchJob
from epd.cache.l3.notices import NodeNotices
from epd.cache.l3.record import num_slices, slice_key

__all__ = ["NodeThread"]

logger = logging.getLogger(__name__)

_TEND_EVERY_S: Final = 0.5
_MAX_CONDEMNED: Final = 1 << 16
_MAX_TOUCHES: Final = 64
_PROBE_KEY: Final = b"probe"
# Of a time limit: a call that had less of it and failed says nothing about the node.
_FAIR_SHARE: Final = 0.5
_STUCK_LIMITS: Final = 2.0
_STUCK_S: Final = 0.05


class NodeThread:
    """Owns the node."""

    def __init__(
        self,
        node: StoreNode,
        *,
        io_bytes: int,
        timeout_s: float,
        max_put_bytes: int,
        value_bytes: Callable[[bytes], int] | None,
        clock: Callable[[], float],
    ) -> None:
        self.name = node.name
        self.breaker = Breaker(node.name, clock)
        self._node = node
        self._notices = NodeNotices(node.name, clock)
        self._io_bytes = io_bytes
        self._timeout_s = timeout_s
        self._max_put_bytes = max_put_bytes
        self._value_bytes = value_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._patient: deque[Job] = deque()
        self._waiting_put_bytes = 0
        self._condemned: dict[bytes, None] = {}
        self._busy_since_s: float | None = None
        self._closing_by_s: float | None = None
        self.counters: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name=f"kv-store {node.name}", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether calls are made just now."""
        since_s = self._busy_since_s
        if since_s is not None and self._clock() - since_s > _STUCK_LIMITS * self._timeout_s + _STUCK_S:
            self.breaker.trip(f"a call has not come back for {_STUCK_LIMITS:g} time limits")
        return self.breaker.is_closed

    def submit(self, job: Job) -> bool:
        """Take the job, to be ended here. False, and it is not taken, when it cannot be done or there is no room."""
        with self._changed:
            if self._closing_by_s is not None:
                return False
            if isinstance(job, DiscardJob):
                self._condemn(job.keys)
                self._urgent.append(job)
            elif not self.is_usable:
                self.counters["skipped"] += job.num_keys
                return False
            elif isinstance(job, PutJob):
                if self._waiting_put_bytes and self._waiting_put_bytes + job.size_bytes > self._max_put_bytes:
                    self.counters["dropped"] += job.num_keys
                    self._notices.dropped.add(
                        job.num_keys,
                        f"{self._waiting_put_bytes:,} bytes wait to be written, of {self._max_put_bytes:,} that may",
                    )
                    return False
                self._waiting_put_bytes += job.size_bytes
                self._patient.append(job)
            elif isinstance(job, TouchJob):
                if sum(isinstance(waiting, TouchJob) for waiting in self._patient) >= _MAX_TOUCHES:
                    self.counters["dropped_touches"] += job.num_keys
                    return False
                self._patient.append(job)
            else:
                self._urgent.append(job)
            self._changed.notify()
        return True

    def count_puts(self, num_kept: int, num_unkept: int) -> None:
        """Of values that were to be put here, when their call has ended."""
        with self._changed:
            self.counters["kept"] += num_kept
            self.counters["unkept"] += num_unkept

    def begin_close(self, by_s: float) -> None:
        """Take no more jobs, and write what waits until `by_s` on the clock."""
        with self._changed:
            if self._closing_by_s is None:
                self._closing_by_s = by_s
            self._changed.notify()

    def finish_close(self, timeout_s: float) -> bool:
        """Every job has ended afterwards. False when the node did not give the thread back."""
        self._thread.join(timeout_s)
        for job in self._take_all():
            self._end(job)
        return not self._thread.is_alive()

    def stats(self) -> NodeStats:
        with self._changed:
            num_waiting = len(self._urgent) + len(self._patient)
            counters = dict(self.counters)
        usage = NodeUsage()
        with contextlib.suppress(NodeFailed):
            usage = self._node.usage()
        return NodeStats(self.name, self.breaker.state, num_waiting, usage, counters)

    def check(self) -> None:
        """Raises AssertionError when the books of the queue do not balance."""
        with self._changed:
            put_bytes = sum(job.size_bytes for job in self._patient if isinstance(job, PutJob))
            assert put_bytes == self._waiting_put_bytes, (
                f"{put_bytes} bytes wait, {self._waiting_put_bytes} on the book"
            )

    def _run(self) -> None:
        while True:
            try:
                job = self._next()
                if job is None:
                    break
                self._step(job)
            except Exception:
                logger.exception("the KV store's node %s failed in a way that is a fault of ours", self.name)
                self.breaker.trip("an unforeseen failure")
                for job in self._take_all():
                    self._end(job)
        for job in self._take_all():
            self._end(job)
        self._notices.tell(at_the_end=True)
        with contextlib.suppress(NodeFailed):
            self._node.close()

    def _next(self) -> Job | None:
        """The job to go on with, tending the node while there is none; None when it is time to end."""
        while True:
            with self._changed:
                for queue in (self._urgent, self._patient):
                    while queue and queue[0].has_ended:
                        self._forget(queue.popleft())
                is_closing = self._closing_by_s is not None
                if self._closing_by_s is not None and self._clock() >= self._closing_by_s:
                    return None
                if self._urgent or self._patient:
                    return self._urgent[0] if self._urgent else self._patient[0]
            if is_closing:
                return None
            self._notices.tell()
            if self.breaker.probes():
                self._probe()
            elif not self._tend():
                self._wait()

    def _wait(self) -> None:
        to_probe_s = self.breaker.seconds_to_probe
        with self._changed:
            if not self._urgent and not self._patient and self._closing_by_s is None:
                self._changed.wait(_TEND_EVERY_S if to_probe_s is None else min(to_probe_s, _TEND_EVERY_S))

    def _tend(self) -> bool:
        if not isinstance(self._node, Tended) or not self.breaker.is_closed:
            return False
        try:
            return self._node.tend()
        except NodeFailed as error:
            self._failed(error)
            return False

    def _probe(self) -> None:
        """Find out whether the node works again, and make up for the discards it missed."""
        with self._call("probe", self._timeout_s):
            self._node.exists([_PROBE_KEY], timeout_s=self._timeout_s)
        if self.breaker.is_closed:
            with self._changed:
                keys = list(self._condemned)
            self._discard(keys)

    def _step(self, job: Job) -> None:
        """One call for this job; it has ended, or there is more to do."""
        left_s = job.deadline_s - self._clock()
        if left_s <= 0:
            self.counters["timeouts"] += 1
            self._end(job)
            return
        if not self.breaker.is_closed:
            self.counters["skipped"] += job.num_unanswered
            self._end(job)
            return
        timeout_s = min(self._timeout_s, left_s)
        if isinstance(job, GetJob):
            goes_on = self._get(job, timeout_s)
        elif isinstance(job, PutJob):
            goes_on = self._put(job, timeout_s)
        else:
            goes_on = False
            if isinstance(job, ExistsJob):
                self._exists(job, timeout_s)
            elif isinstance(job, TouchJob):
                with self._call("touch", timeout_s):
                    self._node.touch([name for key in job.keys for name in self._names(key)], timeout_s=timeout_s)
            elif isinstance(job, DiscardJob):
                self._discard(job.keys)
        if not goes_on:
            self._end(job)

    def _get(self, job: GetJob, timeout_s: float) -> bool:
        slices = job.next_slices(self._io_bytes, self._is_condemned)
        if not slices:
            return False
        damaged: list[bytes] = []
        landed: set[int] = set()

        def sink(position: int, record: memoryview | None) -> None:
            if position in landed:
                return
            landed.add(position)
            if record is not None:
                self.counters["get_bytes"] += record.nbytes
            if not job.land(slices[position], record, self._io_bytes):
                damaged.append(slices[position].key)
                # At once: whoever is told of its key may look at the count next.
                self.counters["corrupt"] += 1

        with self._call("get", timeout_s) as call:
            self._node.get([piece.key for piece in slices], sink, timeout_s=timeout_s)
        for position, piece in enumerate(slices):
            if position not in landed:
                job.land(piece, None, self._io_bytes)
        if damaged:
            self._notices.damaged.add(len(damaged))
            self._forget_damaged(damaged)
        return call.worked

    def _put(self, job: PutJob, timeout_s: float) -> bool:
        slices = job.next_slices(self._io_bytes)
        if not slices:
            return False
        kept: Sequence[bool] = ()
        with self._call("put", timeout_s) as call:
            kept = self._node.put([(key, pieces) for _, key, pieces in slices], timeout_s=timeout_s)
        if call.worked:
            for (item, _, pieces), is_kept in zip(slices, kept, strict=True):
                if is_kept:
                    self.counters["put_bytes"] += sum(memoryview(piece).nbytes for piece in pieces)
                key = job.written(item, is_kept)
                if key is not None:
                    self._condemned.pop(key, None)
            self._note_refused({item for (item, _, _), is_kept in zip(slices, kept, strict=True) if not is_kept})
        return call.worked

    def _note_refused(self, items: set[int]) -> None:
        """Each value once: of one that was refused no other slice is put."""
        if items:
            why = self._node.why_unkept if isinstance(self._node, Explaining) else ""
            self.counters["refused"] += len(items)
            self._notices.refused.add(len(items), why or "it does not say why")

    def _exists(self, job: ExistsJob, timeout_s: float) -> None:
        names = [self._names(key) for key in job.keys]
        flat_names = [name for group in names for name in group]
        found: Sequence[bool] = ()
        with self._call("exists", timeout_s) as call:
            found = self._node.exists(flat_names, timeout_s=timeout_s)
        if not call.worked:
            return
        if len(flat_names) != len(job.keys):
            answers = iter(found)
            found = [False not in list(itertools.islice(answers, len(group))) for group in names]
        if self._condemned:
            found = [there and key not in self._condemned for key, there in zip(job.keys, found, strict=True)]
        job.answer(found)

    def _discard(self, keys: Sequence[bytes]) -> None:
        """Those that could not be discarded stay condemned."""
        if not keys:
            return
        with self._call("discard", self._timeout_s) as call:
            self._node.discard([name for key in keys for name in self._names(key)], timeout_s=self._timeout_s)
        if call.worked:
            with self._changed:
                for key in keys:
                    self._condemned.pop(key, None)

    def _forget_damaged(self, names: Sequence[bytes]) -> None:
        with self._call("discard", self._timeout_s):
            self._node.discard(names, timeout_s=self._timeout_s)

    def _condemn(self, keys: Sequence[bytes]) -> None:
        doomed = frozenset(keys)
        for job in self._patient:
            if isinstance(job, PutJob):
                job.drop(doomed)
        for key in keys:
            self._condemned.pop(key, None)
            self._condemned[key] = None
        while len(self._condemned) > _MAX_CONDEMNED:
            self._condemned.pop(next(iter(self._condemned)))
            self.counters["forgotten_discards"] += 1

    def _is_condemned(self, key: bytes) -> bool:
        return key in self._condemned

    def _names(self, key: bytes) -> list[bytes]:
        """Under which the node keeps the slices of a value."""
        if self._value_bytes is None:
            return [key]
        return [slice_key(key, index) for index in range(num_slices(self._value_bytes(key), self._io_bytes))]

    @contextlib.contextmanager
    def _call(self, kind: str, timeout_s: float) -> Iterator[_Call]:
        """Around one call of the node: what it costs, and what its failure means."""
        call = _Call()
        begun_s = self._busy_since_s = self._clock()
        try:
            yield call
            call.worked = True
            self.breaker.worked()
        except NodeTimedOut as error:
            self.counters["timeouts"] += 1
            if timeout_s >= _FAIR_SHARE * self._timeout_s:
                self._failed(error)
        except NodeFailed as error:
            self._failed(error)
        finally:
            self._busy_since_s = None
            self.seconds[kind] = self.seconds.get(kind, 0.0) + self._clock() - begun_s

    def _failed(self, error: NodeFailed) -> None:
        self.counters["failures"] += 1
        self.breaker.failed(str(error))

    def _end(self, job: Job) -> None:
        job.end()
        with self._changed:
            for queue in (self._urgent, self._patient):
                if queue and queue[0] is job:
                    self._forget(queue.popleft())

    def _forget(self, job: Job) -> None:
        if isinstance(job, PutJob):
            self._waiting_put_bytes -= job.size_bytes

    def _take_all(self) -> list[Job]:
        with self._changed:
            jobs = [*self._urgent, *self._patient]
            self._urgent.clear()
            self._patient.clear()
            self._waiting_put_bytes = 0
        return jobs


class _Call:
    """Whether the node did it."""

    worked = False
