"""Where the rows of a reference are: in an arena of this host or, if they are not, at an encoder on another one.

    fetch --> the arena's thread: map, copy, verify --> deliver
                     | not here, and the reference says where to ask
                     '--> epd.transport.rows: raw frames --> copy, verify --> deliver

The copy is what makes a row right for good: the encoder may write over its arena as soon as a lease ends. Copying and
hashing run without the interpreter lock, so that the loop goes on meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from encoder.client import ArenaReader, verified_copy
from encoder.cluster import ClusterKeys
from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from encoder.wire import TensorFrame
from epd.engine.feed import Deliver
from epd.transport.rows import RowsClient

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Fetch:
    ref: EmbeddingRef
    deadline_unix_s: float
    deliver: Deliver
    is_cancelled: bool = False
    cancel_remote: Callable[[], None] | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.cancel_remote is not None:
            self.cancel_remote()


class HostSource:
    """Fetches one embedding of this host after another, those of other hosts side by side. Threads start when used."""

    def __init__(
        self, *, timeout_s: float, keys: ClusterKeys | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Rows of another host count as lost after `timeout_s`, or at their request's deadline."""
        self._timeout_s = timeout_s
        self._keys = keys
        self._clock = clock
        self._reader = ArenaReader()
        self._remote: RowsClient | None = None
        self._queue: SimpleQueue[_Fetch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        """See `epd.engine.feed.RowSource`. One thread calls this and `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="embedding rows", daemon=True)
            self._thread.start()
        fetch = _Fetch(ref, deadline_unix_s, deliver)
        self._queue.put(fetch)
        return fetch.cancel

    def close(self) -> None:
        """End the threads, after the embedding at hand. May be called twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def _run(self) -> None:
        while (fetch := self._queue.get()) is not None:
            if fetch.is_cancelled:
                continue
            try:
                self._read(fetch)
            except Exception:  # outermost loop of the thread: the request must not wait for ever
                logger.exception("reading the embedding %s failed", fetch.ref.key)
                fetch.deliver(
                    EmbeddingLost(f"the rows of {fetch.ref.key} could not be read; the worker's log says why")
                )

    def _read(self, fetch: _Fetch) -> None:
        try:
            rows = self._reader.tensor(fetch.ref)
        except EmbeddingLost as error:
            if fetch.ref.source:
                self._ask(fetch)
            else:
                fetch.deliver(error)
        else:
            fetch.deliver(rows)

    def _ask(self, fetch: _Fetch) -> None:
        """Ask the encoder itself. On this host, too: it knows whether the rows are gone, and answers at once."""
        if self._remote is None:
            self._remote = RowsClient(keys=self._keys, clock=self._clock)

        def arrived(result: TensorFrame | EmbeddingLost) -> None:
            fetch.deliver(result if isinstance(result, EmbeddingLost) else _owned(result, fetch.ref))

        deadline_unix_s = min(fetch.deadline_unix_s, self._clock() + self._timeout_s)
        fetch.cancel_remote = self._remote.ask(fetch.ref, deadline_unix_s, arrived)
        if fetch.is_cancelled:
            fetch.cancel_remote()


def _owned(frame: TensorFrame, ref: EmbeddingRef) -> Tensor | EmbeddingLost:
    try:
        return verified_copy(frame.data, ref)
    except EmbeddingLost as error:
        return error
