"""Where the bytes of an input come from: files and URLs, a bounded number of bytes at a time."""

import asyncio
import glob
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cli.encode_inputs import Input
from cli.media_files import kind_of_file
from preprocess.config import FetchLimits
from preprocess.errors import MediaUndecodable
from preprocess.sniff import IMAGE_KINDS, describe, sniff
from preprocess.types import MediaSource, Modality

# Content of all files under way; a file larger than this goes alone.
_MAX_HELD_BYTES: Final = 512 * 2**20
_SOUND_KINDS: Final = frozenset({"MP3", "AAC", "WAV", "Wave64", "FLAC", "Ogg", "M4A", "AIFF", "CAF", "AU", "AMR"})
_VIDEO_KINDS: Final = frozenset({"MP4", "Matroska", "FLV", "AVI", "ASF", "MPEG-PS", "MPEG-TS"})


class Sources:
    """Reads inputs, from any thread. URLs are fetched under the rules of the service, on an event loop of their own."""

    def __init__(self, limits: FetchLimits, *, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._limits = limits
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._let_go = threading.Condition()
        self._starting = threading.Lock()
        self._fetching: _Fetching | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends downloads; whoever waits for one gets MediaUnreachable."""
        with self._starting:
            fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching.close()

    @contextmanager
    def content(self, item: Input) -> Iterator[bytes]:
        """The bytes of an input; they count as held until the context ends.

        Waits while much is held. Raises MediaError or OSError.
        """
        if item.is_url:
            content = self._fetcher().fetch(item)
            with self._holding(len(content)):
                yield content
            return
        path = Path(item.location)
        with self._holding(_size_bytes(path)):
            yield path.read_bytes()

    @contextmanager
    def _holding(self, num_bytes: int) -> Iterator[None]:
        with self._let_go:
            self._let_go.wait_for(lambda: not self._held_bytes or self._held_bytes + num_bytes <= self._max_held_bytes)
            self._held_bytes += num_bytes
        try:
            yield
        finally:
            with self._let_go:
                self._held_bytes -= num_bytes
                self._let_go.notify_all()

    def _fetcher(self) -> "_Fetching":
        with self._starting:
            if self._fetching is None:
                self._fetching = _Fetching(self._limits)
            return self._fetching


def _size_bytes(path: Path) -> int:
    """Of a file. Raises OSError for anything else, and for what is not there."""
    try:
        status = path.stat()
    except FileNotFoundError as error:
        is_pattern = glob.has_magic(str(path))
        hint = "; a manifest takes no patterns, the command line does" if is_pattern else ""
        raise OSError(f"no such file{hint}") from error
    kind = kind_of_file(status.st_mode)
    if kind is not None:
        hint = "; a manifest names files, the command line directories as well" if kind == "a directory" else ""
        raise OSError(f"is {kind}, no file{hint}")
    return status.st_size


class _Fetching:
    """A fetcher and the thread of its event loop."""

    def __init__(self, limits: FetchLimits) -> None:
        # Only here: most inputs are files, and the command line is completed without it.
        from preprocess.fetch import Fetcher

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fetch", daemon=True)
        self._thread.start()
        self._fetcher = Fetcher(limits)
        asyncio.run_coroutine_threadsafe(self._fetcher.start(), self._loop).result()

    def fetch(self, item: Input) -> bytes:
        """Raises MediaError."""
        source = MediaSource(item.modality or Modality.IMAGE, item.location)
        return asyncio.run_coroutine_threadsafe(self._fetcher.fetch(source), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._fetcher.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def modality_of_content(content: bytes) -> Modality:
    """For inputs whose names do not say. Raises MediaUndecodable."""
    kind = sniff(content)
    if kind in IMAGE_KINDS:
        return Modality.IMAGE
    if kind in _VIDEO_KINDS:
        return Modality.VIDEO
    if kind in _SOUND_KINDS:
        return Modality.AUDIO
    raise MediaUndecodable(f"neither its name nor its content says image, video or audio: {describe(content)}")
