"""An open medium as a decode pool handles it, wherever it is decoded, and the way of its parts to the pool's loop.

Source      what decodes it: `LocalMedia` in this process, `preprocess.isolation.media.IsolatedMedia` in another
Outlet      takes parts from decoder threads to a coroutine on the loop
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Final, Protocol

from preprocess.errors import DecoderUnavailable, MediaError, MediaTooLarge
from preprocess.pipeline import LayoutChanged, OpenMedia
from preprocess.types import MediaKey, MediaLayout, MediaPart, MelFrames, Pixels, PreparedMedia
from preprocess.watch import Watch

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1

Put = Callable[[MediaPart], Awaitable[None]]
Submit = Callable[[MediaPart], "Future[None]"]


class Source(Protocol):
    """An open medium, wherever it is. Blocking."""

    key: MediaKey

    @property
    def layout(self) -> MediaLayout: ...
    @property
    def mel(self) -> MelFrames | None: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...
    def decode(self, submit: Submit, *, patches_per_part: int | None, raw: bool, watch: Watch) -> bool:
        """False when the medium has changed and must be decoded again."""
        ...

    def close(self) -> None: ...


class LocalMedia:
    """A medium that is decoded by threads of this process."""

    def __init__(self, opened: OpenMedia) -> None:
        self._opened = opened
        self.key = opened.key

    @property
    def layout(self) -> MediaLayout:
        return self._opened.layout

    @property
    def mel(self) -> MelFrames | None:
        return self._opened.mel

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._opened.warnings

    def decode(self, submit: Submit, *, patches_per_part: int | None, raw: bool, watch: Watch) -> bool:
        def put(part: MediaPart) -> None:
            taken = submit(part)
            while not concurrent.futures.wait([taken], timeout=_POLL_S).done:
                watch.check()
            taken.result()

        with memory_errors():
            try:
                self._opened.decode(put, patches_per_part=patches_per_part, raw=raw)
            except LayoutChanged as change:
                self._opened = change.opened
                return False
        return True

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""


class Outlet:
    """Carries parts from decoder threads to a coroutine function on the loop, until it is closed."""

    def __init__(self, put: Put, loop: asyncio.AbstractEventLoop) -> None:
        self._put = put
        self._loop = loop
        self._closed = False
        self._puts: set[asyncio.Task[None]] = set()

    def submit(self, part: MediaPart) -> Future[None]:
        """From any thread."""
        return asyncio.run_coroutine_threadsafe(self._deliver(part), self._loop)

    async def _deliver(self, part: MediaPart) -> None:
        if self._closed:
            raise DecoderUnavailable("decoding was given up: nobody waits for it")
        task = asyncio.current_task()
        assert task is not None, "run as a task"
        self._puts.add(task)
        try:
            await self._put(part)
        finally:
            self._puts.discard(task)

    async def close(self) -> None:
        """No `put` begins after this, and none is under way."""
        self._closed = True
        puts = list(self._puts)
        for task in puts:
            task.cancel()
        await asyncio.gather(*puts, return_exceptions=True)


class Hints:
    """Tells the log what an operator could change for media that were refused, each thing once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, error: BaseException | None) -> None:
        """Nothing for what is no MediaError, or has no hint."""
        if isinstance(error, MediaError) and error.hint and error.hint not in self._told:
            self._told.add(error.hint)
            logger.warning("%s (%s)", error.message, error.hint)


def as_bytes(content: bytes | bytearray | memoryview) -> bytes:
    """The content as decoders take it. Raises TypeError for what holds no bytes."""
    return content if isinstance(content, bytes) else bytes(memoryview(content))


def collect(source: Source, watch: Watch) -> PreparedMedia:
    parts: list[MediaPart] = []

    def submit(part: MediaPart) -> Future[None]:
        parts.append(part)
        taken: Future[None] = Future()
        taken.set_result(None)
        return taken

    while not source.decode(submit, patches_per_part=None, raw=False, watch=watch):
        parts.clear()
    patches = parts[0].pictures if parts else None
    assert not isinstance(patches, Pixels), "patches were asked for"
    return PreparedMedia(
        key=source.key, layout=source.layout, patches=patches, mel=source.mel, warnings=source.warnings
    )


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise MediaTooLarge("decoding needs more memory than the server has for it; send a smaller file") from error
