"""The second tier as an encoder uses it: asked before a medium is decoded, told after it was encoded.

    not in the arena -> find --hit--> into the arena, no decoding, no tower
                          | miss, damaged, late, failing
                        encode -> publish -> keep  (written later, by a task of its own)

Nothing here fails a request or holds it up for longer than `timeout_s`: whatever is wrong with the tier is a miss, and
after some failures in a row the tier is left alone for a while. It is counted, and the log says when that begins and
ends. Reading and writing fail and are left alone apart: that one works proves nothing of the other.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Protocol

from encoder.cache.patience import AGAIN_S
from encoder.errors import ArenaLocked
from encoder.tiers.base import EmbeddingTier, TierFailed
from encoder.tiers.record import Record, RecordDamaged, RecordHeader, pack, unpack
from preprocess.types import MediaKey, MediaLayout

logger = logging.getLogger(__name__)

_FAILURES_IN_A_ROW: Final = 3
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
# Keys, not bytes: rows are read when their turn comes.
_MAX_WAITING: Final = 4096
# Writing has time; the tier's own limits end it before.
_WRITE_TIMEOUT_S: Final = 30.0


class Published(Protocol):
    """What an arena says of an embedding it holds."""

    @property
    def layout(self) -> MediaLayout: ...
    @property
    def checksum(self) -> int: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...


class Source(Protocol):
    """Where embeddings are read to be written; `encoder.cache.store.EmbeddingStore`."""

    def lookup(self, key: MediaKey) -> Published | None:
        """What is published under the key. Raises ArenaLocked."""
        ...

    def content(self, key: MediaKey) -> bytes:
        """Its bytes. Raises KeyError when they are gone, ArenaLocked."""
        ...


class SecondTier:
    """Owns the tier. `start` inside a running loop, `stop` to write what waits."""

    def __init__(
        self,
        tier: EmbeddingTier,
        source: Source,
        *,
        width: int,
        dtype: str,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`width` and `dtype` of the rows that are wanted; `clock` gives seconds that only grow."""
        self._tier = tier
        self._width = width
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._source = source
        self._clock = clock
        self._waiting: deque[MediaKey] = deque()
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._writer: asyncio.Task[None] | None = None
        self._reading = _Trust(f"reading from the embedding store {tier.name}", clock)
        self._writing = _Trust(f"writing to the embedding store {tier.name}", clock)
        self.counters: Counter[str] = Counter()

    def start(self) -> "asyncio.Task[None]":
        """Begin to write. The task does not end before `stop`."""
        self._writer = asyncio.create_task(self._write_all())
        return self._writer

    async def stop(self, drain_s: float) -> None:
        """Give what waits to be written `drain_s`, and close the tier."""
        if not self._writing.is_paused:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        if self._waiting:
            logger.info("%d embeddings were not written to %s", len(self._waiting), self._tier.name)
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        await self._tier.close()

    async def find(self, key: MediaKey) -> Record | None:
        """The verified record of a key, if the tier has it and says so in time."""
        if self._reading.is_paused:
            self.counters["skipped"] += 1
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await self._tier.get(key)
            self._reading.worked()
            if content is None:
                self.counters["misses"] += 1
                return None
            record = unpack(content, key)
        except TimeoutError:
            self._failed(self._reading, f"{self._tier.name} did not answer within {self._timeout_s:g} s")
            return None
        except TierFailed as error:
            self._failed(self._reading, str(error))
            return None
        except RecordDamaged as error:
            self._reading.worked()
            await self._discard(key, error)
            return None
        if (record.header.width, record.header.dtype) != (self._width, self._dtype):
            await self._discard(key, RecordDamaged(f"its rows are {record.header.width} {record.header.dtype}"))
            return None
        self.counters["hits"] += 1
        return record

    def all_counters(self) -> dict[str, float]:
        """Since the start, named for the outside."""
        return {f"tier_{name}": float(number) for name, number in self.counters.items()}

    def keep(self, key: MediaKey) -> None:
        """Write this embedding soon. Under pressure the oldest that wait are given up."""
        if self._writing.is_paused:
            self.counters["unwritten"] += 1
            return
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self.counters["unwritten"] += 1
        self._waiting.append(key)
        self._idle.clear()
        self._woken.set()

    async def _write_all(self) -> None:
        while True:
            if not self._waiting:
                self._idle.set()
                self._woken.clear()
                await self._woken.wait()
                continue
            await self._write(self._waiting.popleft())

    async def _write(self, key: MediaKey) -> None:
        try:
            entry = None if self._writing.is_paused else self._source.lookup(key)
            rows = None if entry is None else self._source.content(key)
        except KeyError:
            # Evicted by another process between the two.
            entry = rows = None
        except ArenaLocked:
            self._waiting.appendleft(key)
            await asyncio.sleep(AGAIN_S)
            return
        if entry is None or rows is None:
            self.counters["unwritten"] += 1
            return
        header = RecordHeader(
            key=key,
            layout=entry.layout,
            width=self._width,
            dtype=self._dtype,
            checksum=entry.checksum,
            warnings=entry.warnings,
        )
        record = pack(header, rows)
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self._tier.put(key, record)
        except TimeoutError:
            self._failed(self._writing, f"{self._tier.name} took no record within {_WRITE_TIMEOUT_S:g} s")
        except TierFailed as error:
            self._failed(self._writing, str(error))
        else:
            self._writing.worked()
            self.counters["written"] += 1

    async def _discard(self, key: MediaKey, error: RecordDamaged) -> None:
        self.counters["damaged"] += 1
        logger.warning("the record of %s in %s is damaged and goes: %s", key, self._tier.name, error)
        with contextlib.suppress(TierFailed, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._tier.discard(key)

    def _failed(self, trust: "_Trust", why: str) -> None:
        self.counters["errors"] += 1
        trust.failed(why)


class _Trust:
    """Whether one side of a tier is to be used, or left alone after failures in a row."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s: float | None = None

    @property
    def is_paused(self) -> bool:
        return self._paused_until_s is not None and self._clock() < self._paused_until_s

    def failed(self, why: str) -> None:
        self._num_failures += 1
        if self._num_failures >= _FAILURES_IN_A_ROW:
            self._paused_until_s = self._clock() + self._pause_s
            logger.warning("%s is left alone for %g s: %s", self._what, self._pause_s, why)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def worked(self) -> None:
        if self._paused_until_s is not None:
            logger.warning("%s works again", self._what)
        self._num_failures, self._pause_s, self._paused_until_s = 0, _FIRST_PAUSE_S, None
