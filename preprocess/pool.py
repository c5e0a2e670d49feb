"""A bounded decode pool for an asyncio server: on threads, or in worker processes.

    prepare          bytes to tower input in one go
    open, decode     first the layout, so that room can be made; then the pictures in parts, which a tower can work on
                     while later ones are decoded

Threads are the default: Pillow, simplejpeg, FFmpeg, libsndfile and torch release the interpreter while they work, so
that two threads decode nearly twice as many pictures as one, and results need no copy. But a thread cannot be killed,
and a crash takes the server with it. A call that runs past its deadline is answered at once with MediaDecodeTimeout;
its thread gives up at the next check (every decoded frame of video or sound), and until then counts as busy, so that a
stuck decoder lowers the pool's capacity instead of piling up threads: see `num_stuck`.

Processes (`preprocess.isolation`) cost a few milliseconds per hundred megabytes to hand over, and in return a medium
can harm nothing but itself.

All videos of a process share one crew of threads, which join whoever decodes while they are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, TypeVar

from preprocess.config import DecodeSettings, ProcessorConfig
from preprocess.crew import Crew
from preprocess.errors import DecoderUnavailable
from preprocess.isolation.media import IsolatedMedia
from preprocess.isolation.nursery import Nursery
from preprocess.pipeline import open_media
from preprocess.pool_source import Hints, LocalMedia, Outlet, Put, Source, as_bytes, collect, memory_errors
from preprocess.types import (
    MediaKey,
    MediaOptions,
    Modality,
    PreparedMedia,
)
from preprocess.watch import Watch

_T = TypeVar("_T")
_WARM_UP_S: Final = 120.0


class MediaChanged(Exception):
    """Damage made another choice of frames necessary. The medium's attributes describe the new one; parts handed over
    so far are void. Decode again. Happens a few times at most."""


class PooledMedia:
    """A medium that `DecodePool.open` has opened. Close it, also after failures: `with` does.

    In processes mode it holds one of the pool's workers from `open` to `close`.
    """

    def __init__(self, source: Source, watch: Watch) -> None:
        self.source = source
        self.watch = watch
        self.busy = False
        """A thread works on it, perhaps one that nobody waits for any more."""
        self.closed = False
        self.decoded = False
        """Decoding has begun, and the medium did not change by it."""
        self._on_release: Callable[[], None] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Reads the attributes anew. The pool's business."""
        self.key = self.source.key
        self.layout = self.source.layout
        """How the rows are arranged. Final unless `decode` raises MediaChanged."""
        self.mel = self.source.mel
        """Input of the audio tower; None where there is no sound."""
        self.warnings = self.source.warnings
        """What was repaired or left out. Complete once `decode` has returned."""

    def close(self) -> None:
        """Lets go of decoder and worker. More than once does nothing more."""
        if self.closed:
            return
        self.closed = True
        # Sound may still be decoded beside, by the crew.
        self.watch.abandon()
        if not self.busy:
            self.release()

    def holding(self, release: Callable[[], None]) -> PooledMedia:
        """Has `release` called when the medium is given up. The pool's business."""
        self._on_release = release
        return self

    def release(self) -> None:
        """Gives up what the medium holds, now that no thread works on it. The pool's business; others `close`."""
        self.source.close()
        if self._on_release is not None:
            self._on_release()

    def __enter__(self) -> PooledMedia:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DecodePool:
    """`num_threads` media are decoded at a time; more wait in arrival order. Close it with `close`."""

    def __init__(
        self, settings: DecodeSettings | None = None, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises DecoderUnavailable where the system cannot isolate processes."""
        self.settings = settings or DecodeSettings()
        self.num_pending = 0
        """Calls waiting or running, for admission and metrics."""
        self.num_stuck = 0
        """Calls that were answered and whose thread still works: decoders that are slow to hear of their deadline."""
        self._clock_s = clock_s
        self._closed = False
        num_threads = self.settings.num_threads
        # One more than media: it makes the workers.
        self._threads = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="decode")
        self._places = asyncio.Semaphore(num_threads)
        self._watches: set[Watch] = set()
        self._hints = Hints()
        self._nursery: Nursery | None = None
        self._crew: Crew | None = None
        if self.settings.isolation == "processes":
            self._nursery = Nursery(self.settings)
            self._nursery.start()
            filling = Watch(_WARM_UP_S)
            self._watches.add(filling)
            self._filled: Future[None] = self._threads.submit(self._nursery.fill, filling)
        else:
            self._crew = Crew(self.settings.num_helpers)

    @property
    def counters(self) -> dict[str, int]:
        """In processes mode, workers lost by reason and processes started: see `Nursery.counters`."""
        return {} if self._nursery is None else self._nursery.counters

    async def warm_up(self) -> None:
        """Waits until the worker processes run. Not needed: media wait for them too. Raises DecoderUnavailable."""
        if self._nursery is not None:
            await asyncio.wrap_future(self._filled)

    async def prepare(
        self,
        content: bytes | bytearray | memoryview,
        *,
        modality: Modality,
        options: MediaOptions,
        config: ProcessorConfig,
        key: MediaKey,
        timeout_s: float | None = None,
    ) -> PreparedMedia:
        """`preprocess.pipeline.prepare` in the pool. The time limit includes waiting for a place in it.

        Raises MediaError.
        """
        watch, content = self._watch(timeout_s), as_bytes(content)

        def call() -> PreparedMedia:
            source = self._open(content, modality, options, config, key, watch, announce=False)
            try:
                return collect(source, watch)
            finally:
                # A crew thread may still decode the sound of what failed.
                watch.abandon()
                source.close()

        with self._counted():
            await self._enter(watch)
            return await self._run(call, watch, done=self._places.release)

    async def open(
        self,
        content: bytes | bytearray | memoryview,
        *,
        modality: Modality,
        options: MediaOptions,
        config: ProcessorConfig,
        key: MediaKey,
        timeout_s: float | None = None,
    ) -> PooledMedia:
        """Everything about a medium but its pictures. The time limit includes waiting for a place in the pool.

        Raises MediaError. Close what it returns.
        """
        watch, content = self._watch(timeout_s), as_bytes(content)
        opened = False

        def call() -> PooledMedia:
            nonlocal opened
            source = self._open(content, modality, options, config, key, watch, announce=True)
            try:
                with memory_errors():
                    medium = PooledMedia(source, watch)
            except BaseException:
                watch.abandon()
                source.close()
                raise
            opened = True
            return medium.holding(self._places.release) if self._nursery is not None else medium

        def done() -> None:
            # In a thread, an open medium holds memory but no thread: others may use its place until it is decoded.
            if self._nursery is None or not opened:
                self._places.release()

        with self._counted():
            await self._enter(watch)
            return await self._run(call, watch, done=done, orphan=PooledMedia.close)

    async def decode(
        self,
        medium: PooledMedia,
        put: Put,
        *,
        patches_per_part: int | None = None,
        raw: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Decodes the pictures and awaits `put` on this loop once per part; returns when all parts were put.

        While `put` waits, so does the decoder that made the part: only a few parts exist at a time. Parts, their sizes,
        `raw` and the order are those of `OpenMedia.decode`; several may be under way at once, none begins after this
        has ended. Sound has no parts. The time limit includes the waiting.

        Once only, but for MediaChanged. Raises MediaError, MediaChanged, ValueError, and what `put` raises.
        """
        if medium.closed or medium.busy:
            raise ValueError("the medium is closed, or being decoded already")
        if medium.decoded:
            raise ValueError("the medium was decoded already; open it again")
        watch = medium.watch
        outlet = Outlet(put, asyncio.get_running_loop())

        def call() -> bool:
            return medium.source.decode(outlet.submit, patches_per_part=patches_per_part, raw=raw, watch=watch)

        def done() -> None:
            medium.busy = False
            if self._nursery is None:
                self._places.release()
            if medium.closed:
                medium.release()

        with self._counted():
            medium.busy = True
            try:
                watch.renew(self._limit_s(timeout_s))
                if self._nursery is None:
                    await self._enter(watch)
            except BaseException:
                medium.busy = False
                raise
            medium.decoded = True
            try:
                unchanged = await self._run(call, watch, done=done)
            finally:
                await outlet.close()
        medium.refresh()
        if not unchanged:
            medium.decoded = False
            raise MediaChanged

    def close(self) -> None:
        """Drops waiting calls; running ones end at their next check, isolated ones at once. Waits for them."""
        self._closed = True
        for watch in list(self._watches):
            watch.abandon()
        if self._nursery is not None:
            self._nursery.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._crew is not None:
            self._crew.close()

    def _limit_s(self, timeout_s: float | None) -> float:
        longest_s = self.settings.max_item_s
        return longest_s if timeout_s is None else min(timeout_s, longest_s)

    def _watch(self, timeout_s: float | None) -> Watch:
        return Watch(self._limit_s(timeout_s), self._clock_s)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_pending += 1
        try:
            yield
        finally:
            self.num_pending -= 1

    async def _enter(self, watch: Watch) -> None:
        """Waits for a place in the pool. Raises MediaDecodeTimeout or DecoderUnavailable."""
        try:
            async with asyncio.timeout(max(0.0, watch.remaining_s)):
                await self._places.acquire()
        except TimeoutError as error:
            raise watch.timeout() from error
        if self._closed:
            self._places.release()
            raise DecoderUnavailable("the decode pool is closed")

    async def _run(
        self,
        call: Callable[[], _T],
        watch: Watch,
        *,
        done: Callable[[], None],
        orphan: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """The call's result from a thread, or MediaDecodeTimeout while the thread still works.

        `done` is called once when the thread is free again, `orphan` with a result that nobody waits for any more.
        """
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._watches.add(watch)
        left = over = False

        def ended(future: asyncio.Future[_T]) -> None:
            nonlocal over
            over = True
            self._watches.discard(watch)
            failed = future.cancelled() or future.exception() is not None
            self._hints.tell(future.exception() if failed and not future.cancelled() else None)
            done()
            if left:
                self.num_stuck -= 1
                if not failed:
                    orphan(future.result())

        running.add_done_callback(ended)
        try:
            await asyncio.wait({running}, timeout=max(0.0, watch.remaining_s))
            if running.done():
                return running.result()
            left = True
            self.num_stuck += 1
            raise watch.timeout()
        except asyncio.CancelledError:
            watch.abandon()
            if not over:
                left = True
                self.num_stuck += 1
            elif not running.cancelled() and running.exception() is None:
                # It ended in this very moment, before this was heard of.
                orphan(running.result())
            raise
        finally:
            # An error's traceback holds this frame: it must not hold the error, or both wait for the collector.
            del running

    def _open(
        self,
        content: bytes,
        modality: Modality,
        options: MediaOptions,
        config: ProcessorConfig,
        key: MediaKey,
        watch: Watch,
        *,
        announce: bool,
    ) -> Source:
        if self._nursery is not None:
            return IsolatedMedia.open(
                self._nursery,
                content,
                modality=modality,
                options=options,
                config=config,
                key=key,
                watch=watch,
                announce=announce,
            )
        with memory_errors():
            return LocalMedia(
                open_media(
                    content,
                    modality=modality,
                    options=options,
                    config=config,
                    key=key,
                    crew=self._crew,
                    check_deadline=watch.check,
                )
            )
