"""Encoding without a server: the same passage through the same decoders and the same runner, hence the same bytes."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from encoder.checkpoint import read_json_object
from encoder.config import EncoderConfig
from encoder.errors import TowerFailed
from encoder.fingerprint import checkpoint_fingerprint
from encoder.passage import Arrival, Passage, Works
from encoder.runner import TowerRunner
from encoder.tower_queue import TowerQueue
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaUnsupported
from preprocess.keys import media_key
from preprocess.pool import DecodePool
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality
from preprocess.video.backends import load_video_backend

# Nobody waits at the other end: a film may take as long as it takes.
_MAX_ITEM_S: Final = 7 * 24 * 3600.0


class LocalRows(NamedTuple):
    """One medium, encoded, its rows as the tower makes them."""

    layout: MediaLayout
    content: memoryview
    """C order, `[num_rows, width]` of `LocalEncoder.dtype`."""
    checksum: int
    """xxh3_64 of the content."""
    warnings: tuple[str, ...]
    """What of the medium was damaged or left out."""


class LocalEmbedding(NamedTuple):
    """One medium, encoded."""

    layout: MediaLayout
    rows: NDArray[np.float32]
    """`[num_rows, width]`; bfloat16 towers widened, which is exact."""
    key: MediaKey
    warnings: tuple[str, ...]
    """What of the medium was damaged or left out."""


class LocalEncoder:
    """The towers of one checkpoint for synchronous callers. `threads` replaces `tower_threads` of the config.

    Any number of threads may call `encode` at once; then the next medium is decoded while the tower works on this one,
    `decode_threads` of them at a time. `num_towers` work on a medium each, with weights of their own; rows are the same
    whichever makes them.
    """

    def __init__(
        self,
        model_dir: Path,
        config: EncoderConfig | None = None,
        *,
        threads: int | None = None,
        num_towers: int = 1,
    ) -> None:
        """Raises CheckpointError or ValueError for a directory that is not a checkpoint with towers, or
        BackendUnavailable."""
        config = replace(config or EncoderConfig(), max_item_s=_MAX_ITEM_S)
        config = config if threads is None else replace(config, tower_threads=threads)
        processor = ProcessorConfig.from_hf(read_json_object(model_dir / "config.json"))
        self._processor = replace(processor, video_backend=config.video_backend)
        load_video_backend(config.video_backend)
        self._fingerprint = checkpoint_fingerprint(model_dir)
        runners = [TowerRunner.load(model_dir, config) for _ in range(num_towers)]
        self._runner = runners[0]
        self._arithmetic = f"{config.device} {config.dtype} {config.tower_threads}{' compiled' * config.compile}"
        plant = _Plant(config, runners, self._processor)
        self._plant = plant
        # For those who forget to close it: a loop that is still at work when the interpreter ends complains.
        self._closing = weakref.finalize(self, plant.close)

    @property
    def dtype(self) -> str:
        """Of rows: float32 or bfloat16."""
        return self._runner.dtype

    @property
    def width(self) -> int:
        """Values in a row."""
        return self._runner.width

    def key(self, content: bytes, modality: Modality, options: MediaOptions) -> MediaKey:
        """Identity of the medium, as the encoder server names it.

        Raises MediaUnsupported without a tower for it, MediaInvalid for an option past a ceiling of the model.
        """
        if modality not in self._runner.modalities:
            raise MediaUnsupported(f"this model has no tower for {modality}")
        return media_key(
            content,
            modality=modality,
            options=options,
            processor=self._processor,
            tower_fingerprint=self._fingerprint,
        )

    def settings(self, modality: Modality, options: MediaOptions) -> str:
        """32 hexadecimal digits of all but the content that decides about rows: options in force, model, arithmetic.

        Options in other words that mean the same are the same here. Raises as `key` does.
        """
        nothing = self.key(b"", modality, options)
        return xxhash.xxh3_128_hexdigest(f"{nothing} {self._arithmetic}".encode())

    def encode(self, content: bytes, modality: Modality, options: MediaOptions | None = None) -> LocalEmbedding:
        """One medium's rows, widened to float32, and what is known of them. Raises as `encode_key` does."""
        options = options or MediaOptions()
        key = self.key(content, modality, options)
        made = self.encode_key(key, content, modality, options)
        rows = _as_float32(made.content, self.dtype)
        return LocalEmbedding(made.layout, rows.reshape(made.layout.num_rows, -1), key, made.warnings)

    def encode_key(self, key: MediaKey, content: bytes, modality: Modality, options: MediaOptions) -> LocalRows:
        """One medium's rows and what is known of them; `key` is its `key`.

        Memory is the rows and a few parts, however long a video is. Raises MediaError for bad media, TowerFailed;
        CancelledError of concurrent.futures when the encoder is closed meanwhile.
        """
        arrival = self._plant.run(partial(Passage, content=content, modality=modality, options=options, key=key))
        return LocalRows(arrival.layout, arrival.place.destination, arrival.checksum, arrival.warnings)

    def close(self) -> None:
        """End the threads, and what they are at."""
        self._closing()


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """Memory of the process, for one medium."""

    content: bytearray

    @property
    def destination(self) -> memoryview:
        return memoryview(self.content)


class _Memory:
    """A room that is never full."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    def try_reserve(self, key: MediaKey, num_rows: int) -> _Buffer:
        return _Buffer(bytearray(num_rows * self._row_bytes))

    async def reserve(self, key: MediaKey, num_rows: int) -> _Buffer:
        return self.try_reserve(key, num_rows)

    def abandon(self, buffer: _Buffer, /) -> None:
        """The memory goes with the object."""


@dataclass(slots=True, eq=False)
class _Line:
    """One tower, and what media pass through on their way to it."""

    works: Works[_Buffer]
    batches: "asyncio.Task[None] | None" = None
    num_passing: int = 0


class _Plant:
    """An event loop in a thread of its own, and on it what media pass through."""

    def __init__(self, config: EncoderConfig, runners: Sequence[TowerRunner], processor: ProcessorConfig) -> None:
        self._runners = runners
        self._pool = DecodePool(config.decode_settings)
        room, decoders = _Memory(runners[0].row_bytes), asyncio.Semaphore(config.decode_threads)
        self._lines = [
            _Line(
                Works(
                    processor=processor,
                    pool=self._pool,
                    tower=TowerQueue(config, runner, time.monotonic),
                    room=room,
                    decoders=decoders,
                    raw=config.sends_pixels,
                    clock=time.monotonic,
                )
            )
            for runner in runners
        ]
        self._ordering = threading.Lock()
        """What is begun is begun before the end."""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._passing: set[asyncio.Task[Arrival[_Buffer]]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-encoder", daemon=True)
        self._thread.start()

    def run(self, begin: Callable[[Works[_Buffer]], Passage[_Buffer]]) -> Arrival[_Buffer]:
        """From any thread. Raises MediaError, TowerFailed; CancelledError when it is closed meanwhile."""
        with self._ordering:
            if self._closed:
                raise RuntimeError("the encoder is closed")
            passing = asyncio.run_coroutine_threadsafe(self._run(begin), self._loop)
        return passing.result()

    async def _run(self, begin: Callable[[Works[_Buffer]], Passage[_Buffer]]) -> Arrival[_Buffer]:
        line = min(self._lines, key=lambda line: line.num_passing)
        if line.batches is None:
            line.batches = asyncio.create_task(line.works.tower.run())
        passing = asyncio.create_task(begin(line.works).run(lambda: None))
        self._passing.add(passing)
        line.num_passing += 1
        try:
            await asyncio.wait({passing, line.batches}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                return passing.result()
            error = line.batches.exception()
            raise TowerFailed(f"the tower's queue has ended: {error}") from error
        finally:
            passing.cancel()
            self._passing.discard(passing)
            line.num_passing -= 1

    def close(self) -> None:
        """Gives up what is under way and ends all threads."""
        with self._ordering:
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.close()
        for runner in self._runners:
            runner.close()

    async def _stop(self) -> None:
        for passing in list(self._passing):
            passing.cancel()
        if self._passing:
            await asyncio.wait(self._passing)
        batches = [line.batches for line in self._lines if line.batches is not None]
        for task in batches:
            task.cancel()
        await asyncio.gather(*batches, return_exceptions=True)


def _as_float32(buffer: memoryview, dtype: str) -> NDArray[np.float32]:
    if dtype == "float32":
        return np.frombuffer(buffer, dtype=np.float32)
    bits = np.frombuffer(buffer, dtype=np.uint16).astype(np.uint32)
    return (bits << 16).view(np.float32)
