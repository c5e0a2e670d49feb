"""The media of one request: fetched, keyed and encoded at the same time, held by leases until they are read.

    source -> bytes -> key -> EncodeReply (layout, ref under a lease)

Leases end at an attempt's first token, when prefill has read every row: decoding may take long, and the arena is for
those who come next. A later attempt encodes again, from the cache as a rule.

A fault of one part ends the request with that part's name. Retrying on another replica is the client's business.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from encoder.errors import ArenaFull, EmbeddingTooLarge, EmbeddingUnknown, EncoderError, EncoderUnavailable
from encoder.tracing import span
from encoder.types import EmbeddingRef, EncodeReply, EncoderInfo
from encoder.wire import TensorFrame
from epd.errors import InvalidRequest, ServeError
from epd.gateway.account import Account
from epd.gateway.library import unknown_media
from epd.gateway.media_parts import MediaPart
from epd.gateway.problems import Problem, Refused, problem_of
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaError, MediaInvalid
from preprocess.keys import media_key
from preprocess.types import MediaKey, MediaLayout, MediaOptions, MediaSource, Modality

# Hashed on the event loop; more is hashed on a thread. A request may bring many media, and many requests may.
_INLINE_HASH_BYTES = 256 << 10
_WATCH_S = 0.5

_T = TypeVar("_T")


class Encoder(Protocol):
    """The encoder stage as the gateway uses it: `encoder.client.EncoderClient`, over ZMQ or in one process."""

    async def encode(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> EncodeReply:
        """Raises MediaError for a fault of the content, EncoderError for one of the stage; waits for a replica.

        Without content the key alone is known: raises EmbeddingUnknown when no replica has it.
        """
        ...

    async def encode_inline(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> tuple[EncodeReply, TensorFrame]:
        """`encode` with the rows themselves, for who cannot map the arena."""
        ...

    def release(self, ref: EmbeddingRef) -> None:
        """Give a lease back; never waits, a lost encoder is no error."""
        ...

    async def info(self, timeout_s: float = ...) -> EncoderInfo:
        """A replica that is up. Raises EncoderUnavailable after `timeout_s`."""
        ...

    def infos(self) -> Mapping[str, EncoderInfo | None]:
        """Every replica's last word by address; None for one that is not up."""
        ...

    def why_not_up(self) -> Mapping[str, str | None]:
        """Reasons for people by address; None for a replica that is up."""
        ...


class MediaFetcher(Protocol):
    """`preprocess.fetch.Fetcher`."""

    async def fetch(self, source: MediaSource, *, asker: Hashable | None = None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Medium:
    """One part, fetched. The content is kept: after a loss it is encoded again.

    None for a medium of which only the key is known here: it is used as long as an encoder has its embedding.
    """

    part: MediaPart
    content: bytes | None
    key: MediaKey


class MediaSet:
    """The encoded media of one request, in the order of its parts."""

    def __init__(self, stage: "MediaStage", deadline_unix_s: float, account: Account | None) -> None:
        self._stage = stage
        self._account = account
        self._deadline_unix_s = deadline_unix_s
        self._media: list[Medium] = []
        self._replies: list[EncodeReply] = []
        self._leased: list[EmbeddingRef] = []

    @property
    def layouts(self) -> list[tuple[MediaKey, MediaLayout]]:
        return [(reply.key, reply.layout) for reply in self._replies]

    @property
    def refs(self) -> tuple[EmbeddingRef, ...]:
        return tuple(reply.ref for reply in self._replies)

    @property
    def num_cached(self) -> int:
        return sum(reply.cached for reply in self._replies)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the media was damaged or left out, each naming its part."""
        return tuple(
            f"{medium.part.param}: {warning}"
            for medium, reply in zip(self._media, self._replies, strict=True)
            for warning in reply.warnings
        )

    @property
    def told(self) -> list[dict[str, Any]]:
        """What the media are called, and what they took, as the client is told."""
        return [
            {
                "param": medium.part.param,
                "key": reply.key,
                "uuid": _kept_uuid(medium.part),
                "modality": reply.layout.modality.value,
                "tokens": reply.layout.num_rows,
                "cached": reply.cached,
            }
            for medium, reply in zip(self._media, self._replies, strict=True)
        ]

    async def prepare(self, parts: Sequence[MediaPart]) -> None:
        """Raises Refused naming the part."""
        self._media = await _all(self._fetch(part) for part in parts)
        await self._encode()

    async def refresh(self, keep: bool = False) -> tuple[EmbeddingRef, ...]:
        """Fresh refs for the same media, after a loss. What the encoder still has comes from its cache.
        `keep`: somebody may still read by the present ones."""
        if self._media:
            if not keep:
                self.release()
            await self._encode()
        return self.refs

    def release(self) -> None:
        """End the leases that are held; each is released once, however often this is called."""
        while self._leased:
            self._stage.release(self._leased.pop())

    def close(self) -> None:
        self.release()
        self._media.clear()

    async def _fetch(self, part: MediaPart) -> Medium:
        started_s = self._stage.clock()
        try:
            return await self._stage.fetch(part, asker=self)
        finally:
            if self._account is not None:
                self._account.add("gateway", "fetch", started_s, self._stage.clock(), item=part.param)

    async def _encode(self) -> None:
        self._replies = await _all(self._encode_one(medium) for medium in self._media)

    async def _encode_one(self, medium: Medium) -> EncodeReply:
        started_s = self._stage.clock()
        try:
            reply = await self._stage.encode(medium, self._deadline_unix_s)
        except ArenaFull as error:
            raise Refused(self._problem_of_room(error, medium)) from error
        # Noted as soon as it exists: a neighbour's failure must not leave it behind.
        self._leased.append(reply.ref)
        _check_modality(medium.part, reply.layout.modality)
        if self._account is not None:
            stopped_s, item = self._stage.clock(), medium.part.param
            self._account.encoded(reply.timings, started_s, stopped_s, item=item)
        return reply

    def _problem_of_room(self, error: ArenaFull, medium: Medium) -> Problem:
        """Waiting helps, unless this medium and those the request holds already are too much for an empty arena."""
        if error.needed_bytes is None:
            return problem_of(error, param=medium.part.param)
        sizes_bytes = [error.needed_bytes, *{ref.key: ref.size_bytes for ref in self._leased}.values()]
        taken_bytes, arena_bytes = self._stage.arena_use(sizes_bytes)
        if taken_bytes <= arena_bytes or not arena_bytes:
            return problem_of(error, param=medium.part.param)
        message = (
            f"the media of this request take at least {taken_bytes} bytes of the embedding arena at the same time, "
            f"it has {arena_bytes}"
        )
        return problem_of(EmbeddingTooLarge(message), param=medium.part.param)


class MediaStage:
    """From parts to encoded media, for all requests of one gateway."""

    def __init__(
        self,
        *,
        fetcher: MediaFetcher,
        encoder: Encoder,
        processor: ProcessorConfig | None,
        clock: Callable[[], float],
        patience_s: Callable[[], float],
    ) -> None:
        """`patience_s`: how long to wait, as of now, while no encoder is up."""
        self._fetcher = fetcher
        self._encoder = encoder
        self._processor = processor
        self.clock = clock
        self._patience_s = patience_s

    @asynccontextmanager
    async def open(
        self, parts: Sequence[MediaPart], *, deadline_unix_s: float, account: Account | None = None
    ) -> AsyncGenerator[MediaSet, None]:
        """Fetch and encode the parts; what is leased at the end of the block is released, whatever ends it. The steps
        are entered in `account`."""
        media = MediaSet(self, deadline_unix_s, account)
        try:
            if parts:
                await media.prepare(parts)
            yield media
        finally:
            media.close()

    async def fetch(self, part: MediaPart, *, asker: Hashable) -> Medium:
        """The content and its key. `asker` is the request, which has a share of the downloads and no more.

        Raises Refused naming the part.
        """
        processor = self._processor
        if processor is None:
            raise InvalidRequest("this model takes text only", param=part.param)
        try:
            # The options are checked before the first byte is fetched.
            _check_options(part.source, processor)
            part, content = await self._find(part, asker)
            if content is None:
                assert part.key is not None, "a part without content has a name"
                return Medium(part, None, part.key)
            info = await self._encoder.info(self._patience_s())
            processor = replace(processor, video_backend=info.video_backend)
            key = await _key(content, part.source, processor, info.fingerprint)
        except (MediaError, EncoderError) as error:
            option = error.field if isinstance(error, MediaInvalid) else None
            raise Refused(problem_of(error, param=part.param_of(option))) from error
        if part.key not in (None, key):
            raise _other_key(part, key)
        if part.is_told and part.library is not None:
            part.library.remember(content, part.source.modality, part.source.options, uuid=part.uuid, key=key)
        return Medium(part, content, key)

    async def _find(self, part: MediaPart, asker: Hashable) -> tuple[MediaPart, bytes | None]:
        """The content, and the part with the options that belong to it; None where only an encoder may have it.

        Raises MediaError, and ServeError naming the part.
        """
        if part.content is not None:
            return part, part.content
        if part.file_id is not None and part.library is not None:
            return part, await part.library.file(part.file_id, f"{part.param}.file_id")
        if part.has_source:
            attributes = {"mimo.request.part": part.param, "mimo.media.modality": part.source.modality.value}
            with span("mimo.media.fetch", kind="client", attributes=attributes) as traced:
                content = await self._fetcher.fetch(part.source, asker=asker)
                traced.set({"mimo.media.bytes": len(content)})
            return part, content
        found = None if part.library is None else part.library.named(uuid=part.uuid, key=part.key)
        if found is None:
            if part.key is None:
                raise unknown_media(uuid=part.uuid, key=None, path=part.path)
            return part, None
        if part.key is not None:
            _check_modality(part, found.modality)
            part = replace(part, source=MediaSource(found.modality, "", found.options))
        return part, found.content

    async def encode(self, medium: Medium, deadline_unix_s: float) -> EncodeReply:
        """Raises Refused naming the part, also when no encoder has been up for `patience_s`; ArenaFull."""
        source = medium.part.source
        asked = self._encoder.encode(medium.content, source.modality, source.options, medium.key, deadline_unix_s)
        try:
            return await self._while_there_is_hope(asyncio.ensure_future(asked))
        except ArenaFull:
            raise
        except EmbeddingUnknown as error:
            raise unknown_media(uuid=None, key=medium.key, path=medium.part.path) from error
        except (MediaError, EncoderError) as error:
            raise Refused(problem_of(error, param=medium.part.param)) from error

    def release(self, ref: EmbeddingRef) -> None:
        self._encoder.release(ref)

    def arena_use(self, sizes_bytes: Iterable[int]) -> tuple[int, int]:
        """What embeddings of these sizes take at least, and what the arenas of all encoders that are up have."""
        infos = [info for info in self._encoder.infos().values() if info is not None]
        page_bytes = min((info.page_bytes for info in infos), default=1)
        taken_bytes = sum(-(-size_bytes // page_bytes) * page_bytes for size_bytes in sizes_bytes)
        # Encoders of one host share an arena.
        return taken_bytes, sum({info.arena: info.capacity_bytes for info in infos}.values())

    async def _while_there_is_hope(self, reply: asyncio.Future[EncodeReply]) -> EncodeReply:
        """The client waits for a replica until the request's deadline; here that ends after `patience_s`."""
        seen_s = self.clock()
        try:
            while not reply.done():
                await asyncio.wait({reply}, timeout=_WATCH_S)
                if any(self._encoder.infos().values()):
                    seen_s = self.clock()
                elif self.clock() - seen_s > self._patience_s():
                    raise EncoderUnavailable("no encoder is up", retry_after_s=5.0)
        except BaseException:
            reply.cancel()
            # It may have been answered in the same moment, and nobody else would give that lease back.
            reply.add_done_callback(self._release_unseen)
            raise
        return reply.result()

    def _release_unseen(self, reply: asyncio.Future[EncodeReply]) -> None:
        if not reply.cancelled() and reply.exception() is None:
            self.release(reply.result().ref)


def _kept_uuid(part: MediaPart) -> str | None:
    """None where the content is too large for the shelf: then the name stands for nothing."""
    library = part.library
    if part.uuid is None or library is None or not library.shelf.has_uuid(library.owner, part.uuid):
        return None
    return part.uuid


async def _all(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order. The first failure is raised, after every other one was cancelled and has ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _key(content: bytes, source: MediaSource, processor: ProcessorConfig, fingerprint: str) -> MediaKey:
    def compute() -> MediaKey:
        return media_key(
            content,
            modality=source.modality,
            options=source.options,
            processor=processor,
            tower_fingerprint=fingerprint,
        )

    return compute() if len(content) <= _INLINE_HASH_BYTES else await asyncio.to_thread(compute)


def _check_modality(part: MediaPart, found: Modality) -> None:
    """Raises InvalidRequest for a key of something else than the part says; its content would have been refused."""
    if found is not part.source.modality:
        what = f"{part.path}.key stands for a medium of kind {found.value}"
        raise InvalidRequest(f"{what}, the part is of kind {part.source.modality.value}", param=f"{part.path}.key")


def _other_key(part: MediaPart, key: MediaKey) -> ServeError:
    """A key that is given is meant: what has another one is not what the client has in mind."""
    if not part.has_source and part.uuid is None:
        # It was the key before the model or its settings changed.
        return unknown_media(uuid=None, key=part.key, path=part.path)
    whose = "the content" if part.has_source else "what the uuid stands for"
    return InvalidRequest(
        f"{part.path}.key is {part.key}; the key of {whose}, with these options, is {key}", param=f"{part.path}.key"
    )


def _check_options(source: MediaSource, processor: ProcessorConfig) -> None:
    """Raises MediaInvalid for an option above this server's ceiling."""
    match source.modality:
        case Modality.IMAGE:
            processor.image_budget(source.options)
        case Modality.VIDEO:
            processor.video_budget(source.options)
        case Modality.AUDIO:
            pass
