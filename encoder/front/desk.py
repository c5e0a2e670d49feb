"""Where every dialect of the front asks for an embedding: fetch -> key -> replica -> rows that can be read here.

    source --fetch--> content --hash--> key --ring--> replica --reply--> rows in the host's arena, under a lease
                                                                 '-----> rows in the reply, from another host

Rows of a replica on this host are a view of shared memory and cost no copy. The lease ends with `Encoding.release`, or
at the deadline of whoever asked: read the rows before that.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from encoder.cache.arena import segment_path
from encoder.client import ArenaReader
from encoder.errors import EmbeddingLost, EncodeDeadline, EncoderBusy, EncoderError, EncoderUnavailable
from encoder.tracing import span
from encoder.types import EmbeddingRef, EncodeReply, EncoderInfo, StageTimings
from encoder.wire import TensorFrame
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaError, MediaInvalid, MediaUnsupported
from preprocess.keys import media_key
from preprocess.types import MediaKey, MediaLayout, MediaOptions, MediaSource, Modality

# Hashed on the event loop; more is hashed on a thread.
_INLINE_HASH_BYTES: Final = 256 << 10
_WATCH_S: Final = 0.5

_Answer = tuple[EncodeReply, memoryview | None]


@dataclass(slots=True, eq=False, kw_only=True)
class Encoding:
    """One medium, encoded. Its rows stay what they are until `release`, or until the deadline it was asked with."""

    key: MediaKey
    layout: MediaLayout
    dtype: str
    """float32 or bfloat16."""
    num_rows: int
    width: int
    cached: bool
    warnings: tuple[str, ...]
    timings: StageTimings
    """Of the replica."""
    fetch_s: float
    """Getting the content; zero for content that came with the request."""
    rows: memoryview
    """Bytes of `[num_rows, width]`, C order, little-endian; read-only by agreement."""
    _end: Callable[[], None] | None = field(repr=False)

    def release(self) -> None:
        """Give the lease back; the rows may be anything after this. May be called again."""
        end, self._end = self._end, None
        if end is not None:
            end()


@dataclass(slots=True, eq=False)
class MediumEnd:
    """How one medium ended, for whoever counts. `outcome`: encoded, cached, cancelled, or the code of its error."""

    modality: Modality
    outcome: str = "internal_error"
    fetch_s: float = 0.0
    cached: bool = False


class MediaEncoder(Protocol):
    """`encoder.client.EncoderClient`."""

    async def encode(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> EncodeReply: ...
    async def encode_inline(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> tuple[EncodeReply, TensorFrame]: ...
    def release(self, ref: EmbeddingRef) -> None: ...
    async def info(self, timeout_s: float = ...) -> EncoderInfo: ...
    def infos(self) -> Mapping[str, EncoderInfo | None]: ...


class MediaFetcher(Protocol):
    """`preprocess.fetch.Fetcher`."""

    async def fetch(self, source: MediaSource, *, asker: Hashable | None = None) -> bytes: ...


class EncodeDesk:
    """Encodes single media for the handlers of one process, on its event loop. Fetcher and client are the caller's."""

    def __init__(
        self,
        *,
        fetcher: MediaFetcher,
        encoder: MediaEncoder,
        processor: ProcessorConfig,
        max_inflight: int = 256,
        patience_s: Callable[[], float] = lambda: 12.0,
        on_end: Callable[[MediumEnd], None] = lambda end: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """At most `max_inflight` media at a time, one more is refused. `patience_s`: how long to wait, as of now, while
        no replica is up. `on_end` hears of every medium once. `clock` gives Unix seconds.
        """
        self._fetcher = fetcher
        self._encoder = encoder
        self._processor = processor
        self._max_inflight = max_inflight
        self._patience_s = patience_s
        self._on_end = on_end
        self._clock = clock
        self._reader = ArenaReader()
        self._info: EncoderInfo | None = None
        self._elsewhere: set[str] = set()
        self.num_inflight = 0
        """Media being fetched or encoded now."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the replicas encode. Raises EncoderUnavailable while none has been up, like the next two."""
        return self._known().modalities

    @property
    def width(self) -> int:
        """Values in a row."""
        return self._known().width

    @property
    def dtype(self) -> str:
        """float32 or bfloat16."""
        return self._known().dtype

    async def learn(self, timeout_s: float | None = None) -> EncoderInfo:
        """A replica that is up, waited for. Raises EncoderUnavailable after `timeout_s`, or the patience of now."""
        self._info = await self._encoder.info(self._patience_s() if timeout_s is None else timeout_s)
        return self._info

    def _known(self) -> EncoderInfo:
        """The last word of any replica, also of one that is not up at present: all run the same weights."""
        up = next((info for info in self._encoder.infos().values() if info is not None), None)
        self._info = up or self._info
        if self._info is None:
            raise EncoderUnavailable("no encoder has been up yet", retry_after_s=1.0)
        return self._info

    async def encode(
        self, source: MediaSource, *, asker: Hashable, deadline_unix_s: float, sha256: bytes | None = None
    ) -> Encoding:
        """Rows of the medium behind a URL.

        `asker` is the request, which has a share of the downloads and no more. `sha256` is the digest that the content
        must have. Raises MediaError for a fault of the medium, EncoderError for one of the stage; EncodeDeadline also
        while the content is still being fetched.
        """
        with self._place(source.modality) as end:
            self._check_options(source.modality, source.options)
            started_s = self._clock()
            try:
                with span("mimo.media.fetch", kind="client", attributes={"mimo.media.modality": source.modality.value}):
                    async with asyncio.timeout(max(0.0, deadline_unix_s - started_s)) as limit:
                        content = await self._fetcher.fetch(source, asker=asker)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise EncodeDeadline("the deadline passed while the medium was fetched") from error
            end.fetch_s = self._clock() - started_s
            if sha256 is not None:
                await _check_digest(content, sha256)
            return await self._encode(content, source.modality, source.options, deadline_unix_s, end)

    async def encode_content(
        self, content: bytes, modality: Modality, options: MediaOptions, *, deadline_unix_s: float
    ) -> Encoding:
        """`encode` of bytes that are here already. The options must apply to the modality."""
        with self._place(modality) as end:
            self._check_options(modality, options)
            return await self._encode(content, modality, options, deadline_unix_s, end)

    async def encode_key(self, key: MediaKey, modality: Modality, *, deadline_unix_s: float) -> Encoding:
        """Rows of a medium of which only the key is known. Raises EmbeddingUnknown when no replica has them."""
        with self._place(modality) as end:
            await self._learn_by(deadline_unix_s)
            return await self._encode_known(None, modality, MediaOptions(), key, deadline_unix_s, end)

    def check_room(self, num_media: int) -> None:
        """Raises EncoderBusy when so many more would be too many."""
        if self.num_inflight + num_media > self._max_inflight:
            limit = f"{self.num_inflight} media are in flight, {self._max_inflight} is the limit"
            raise EncoderBusy(limit, retry_after_s=1.0)

    @contextmanager
    def _place(self, modality: Modality) -> Iterator[MediumEnd]:
        """A place among the media in flight, and what is told of this one in the end. Raises EncoderBusy."""
        end = MediumEnd(modality)
        try:
            if self.num_inflight >= self._max_inflight:
                limit = f"{self._max_inflight} media are in flight, which is the limit"
                raise EncoderBusy(limit, retry_after_s=1.0)
            self.num_inflight += 1
            try:
                yield end
            finally:
                self.num_inflight -= 1
            end.outcome = "cached" if end.cached else "encoded"
        except (MediaError, EncoderError) as error:
            end.outcome = error.code
            raise
        except asyncio.CancelledError:
            end.outcome = "cancelled"
            raise
        finally:
            self._on_end(end)

    async def _encode(
        self, content: bytes, modality: Modality, options: MediaOptions, deadline_unix_s: float, end: MediumEnd
    ) -> Encoding:
        info = await self._learn_by(deadline_unix_s)
        if modality not in info.modalities:
            raise MediaUnsupported(f"this model has no tower for {modality}")
        processor = replace(self._processor, video_backend=info.video_backend)
        key = await _key(content, modality, options, processor, info.fingerprint)
        return await self._encode_known(content, modality, options, key, deadline_unix_s, end)

    async def _learn_by(self, deadline_unix_s: float) -> EncoderInfo:
        return await self.learn(min(self._patience_s(), max(0.0, deadline_unix_s - self._clock())))

    async def _encode_known(
        self,
        content: bytes | None,
        modality: Modality,
        options: MediaOptions,
        key: MediaKey,
        deadline_unix_s: float,
        end: MediumEnd,
    ) -> Encoding:
        if not self._only_elsewhere():
            reply, _ = await self._ask(content, modality, options, key, deadline_unix_s, inline=False)
            try:
                return self._encoding(reply, self._reader.content(reply.ref), end)
            except EmbeddingLost:
                # The replica is on another host, or has ended since: ask once more, for the bytes themselves.
                self._encoder.release(reply.ref)
                if not segment_path(reply.ref.arena).exists():
                    self._elsewhere.add(reply.ref.arena)
        reply, rows = await self._ask(content, modality, options, key, deadline_unix_s, inline=True)
        assert rows is not None, "an inline reply carries its rows"
        return self._encoding(reply, rows, end)

    def _only_elsewhere(self) -> bool:
        """Whether no arena of a replica that is up can be mapped here, as far as is known."""
        arenas = {info.arena for info in self._encoder.infos().values() if info is not None}
        self._elsewhere &= arenas
        return bool(arenas) and arenas == self._elsewhere

    def _encoding(self, reply: EncodeReply, rows: memoryview, end: MediumEnd) -> Encoding:
        ref = reply.ref
        end.cached = reply.cached
        return Encoding(
            key=reply.key,
            layout=reply.layout,
            dtype=ref.dtype,
            num_rows=ref.num_rows,
            width=ref.width,
            cached=reply.cached,
            warnings=reply.warnings,
            timings=reply.timings,
            fetch_s=end.fetch_s,
            rows=rows,
            _end=lambda: self._encoder.release(ref),
        )

    def _check_options(self, modality: Modality, options: MediaOptions) -> None:
        """Raises MediaInvalid for an option above this server's ceiling, before anything is fetched."""
        match modality:
            case Modality.IMAGE:
                self._processor.image_budget(options)
            case Modality.VIDEO:
                self._processor.video_budget(options)
            case Modality.AUDIO:
                pass

    async def _ask(
        self,
        content: bytes | None,
        modality: Modality,
        options: MediaOptions,
        key: MediaKey,
        deadline_unix_s: float,
        *,
        inline: bool,
    ) -> _Answer:
        """The client waits for a replica until the deadline; here that ends after `patience_s` without any."""

        async def asking() -> _Answer:
            if not inline:
                return await self._encoder.encode(content, modality, options, key, deadline_unix_s), None
            reply, frame = await self._encoder.encode_inline(content, modality, options, key, deadline_unix_s)
            return reply, frame.data

        asked = asyncio.create_task(asking())
        seen_s = self._clock()
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=_WATCH_S)
                if any(self._encoder.infos().values()):
                    seen_s = self._clock()
                elif self._clock() - seen_s > self._patience_s():
                    raise EncoderUnavailable("no encoder is up", retry_after_s=5.0)
        except BaseException:
            asked.cancel()
            # It may have been answered in the same moment, and nobody else would give that lease back.
            asked.add_done_callback(self._release_unseen)
            raise
        return asked.result()

    def _release_unseen(self, asked: "asyncio.Task[_Answer]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._encoder.release(asked.result()[0].ref)


async def _key(
    content: bytes, modality: Modality, options: MediaOptions, processor: ProcessorConfig, fingerprint: str
) -> MediaKey:
    def compute() -> MediaKey:
        return media_key(
            content, modality=modality, options=options, processor=processor, tower_fingerprint=fingerprint
        )

    return compute() if len(content) <= _INLINE_HASH_BYTES else await asyncio.to_thread(compute)


async def _check_digest(content: bytes, sha256: bytes) -> None:
    """Raises MediaInvalid for other content than was asked for."""

    def compute() -> bytes:
        return hashlib.sha256(content).digest()

    found = compute() if len(content) <= _INLINE_HASH_BYTES else await asyncio.to_thread(compute)
    if found != sha256:
        raise MediaInvalid(f"the content has the SHA-256 {found.hex()}, not {sha256.hex()} as asked for")
