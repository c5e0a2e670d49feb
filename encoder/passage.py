"""One medium's way from bytes to rows: open, make room, decode and encode part by part.

    open --> room? --yes--> sound ---------------------------> tower queue \\
      ^        | no         decode -> part -> tower queue                   > its rows of the room -> all there: arrived
      |      close,                \\-> part -> tower queue                 /
      |      stand in line
      '--------'

Room is made when the layout is known, before any picture is decoded, and each part is a tower job of its own as soon as
it is there: the tower works on the beginning of a video while its end is still being decoded. Decoding pauses while
enough waits for the tower, so memory is a few parts, however long the video is.

Who finds no room lets go of its decoder while it waits, and opens the medium anew afterwards. Nothing else that waits
here holds what another waits for: decoders wait for the tower, the tower for nobody.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from encoder.errors import EncoderError, TowerFailed
from encoder.runner import PASS_PATCHES, MediumRows, TowerJob
from encoder.tower_queue import Ticket, TowerQueue
from encoder.types import StageTimings
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaDecodeTimeout, MediaUndecodable
from preprocess.pool import DecodePool, MediaChanged, PooledMedia
from preprocess.types import MediaKey, MediaLayout, MediaOptions, MediaPart, Modality

# How often damage may show another layout; the decoder's own bound is lower.
MAX_CHANGES: Final = 4


class Place(Protocol):
    """Memory for the rows of one medium."""

    @property
    def destination(self) -> memoryview:
        """Exactly as many bytes as the rows take."""
        ...


PlaceT = TypeVar("PlaceT", bound=Place)


class Room(Protocol[PlaceT]):
    """Where places come from."""

    def try_reserve(self, key: MediaKey, num_rows: int) -> PlaceT | None:
        """A place now, or None where waiting for one may help."""
        ...

    async def reserve(self, key: MediaKey, num_rows: int) -> PlaceT:
        """A place, now or later. Raises EncoderError when there is none in time."""
        ...

    def abandon(self, reservation: PlaceT, /) -> None:
        """Takes back a place whose rows will not come."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Works(Generic[PlaceT]):
    """What all media of a process pass through. On one event loop."""

    processor: ProcessorConfig
    pool: DecodePool
    tower: TowerQueue
    room: Room[PlaceT]
    decoders: asyncio.Semaphore
    """As many as media may be open."""
    raw: bool
    """Pictures go to the tower as pixels, and are resized and cut there."""
    clock: Callable[[], float]


@dataclass(slots=True)
class Moments:
    """When the medium was first and last prepared and in the tower, by the clock of the works; None until it was."""

    prepared: tuple[float, float] | None = None
    in_tower: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Arrival(Generic[PlaceT]):
    """A medium whose rows are all in `place`, which now belongs to whoever asked for them."""

    place: PlaceT
    layout: MediaLayout
    checksum: int
    warnings: tuple[str, ...]


class Passage(Generic[PlaceT]):
    """The way of one medium through the works. Whatever ends it early, nothing of it stays behind."""

    def __init__(
        self, works: Works[PlaceT], content: bytes, *, modality: Modality, options: MediaOptions, key: MediaKey
    ) -> None:
        self._works = works
        self._content: bytes | None = content
        self._modality = modality
        self._options = options
        self._key = key
        self._place: PlaceT | None = None
        self._num_rows = 0
        self._rows: MediumRows | None = None
        self._warnings: tuple[str, ...] = ()
        self._tickets: set[Ticket] = set()
        self._failure: TowerFailed | None = None
        self.moments = Moments()
        self._prepare_s = 0.0
        self._batch_wait_s = 0.0
        self._tower_s: dict[int, float] = {}

    @property
    def content_bytes(self) -> int:
        """What waits to be decoded; 0 once it is decoded."""
        return 0 if self._content is None else len(self._content)

    @property
    def is_landing(self) -> bool:
        """Everything is decoded and in the tower, or has been: what is left cannot be stopped, and is worth keeping."""
        return self._content is None and all(ticket.in_tower for ticket in self._tickets)

    @property
    def timings(self) -> StageTimings:
        """Of what has been done so far."""
        return StageTimings(
            prepare_s=self._prepare_s, batch_wait_s=self._batch_wait_s, tower_s=sum(self._tower_s.values())
        )

    async def run(self, remaining_s: Callable[[], float | None]) -> Arrival[PlaceT]:
        """All of it, once. `remaining_s` tells how much time is left, None for as long as it takes.

        Raises MediaError for bad media, TowerFailed, and what the room raises. When cancelled, it still waits for jobs
        that are in the tower, since they write to the place.
        """
        arrived = False
        try:
            await self._decode(remaining_s)
            self._content = None
            await self._settle()
            if self._failure is not None:
                raise self._failure
            rows, place = self._rows, self._place
            assert place is not None, "what was decoded had room"
            assert rows is not None, "and rows in it"
            if rows.checksum is None:
                raise EncoderError(f"{rows.num_missing} rows of this medium were never made")
            arrived = True
            return Arrival(place, rows.layout, rows.checksum, self._warnings)
        finally:
            if not arrived:
                await self._leave()

    async def _decode(self, remaining_s: Callable[[], float | None]) -> None:
        """Hands everything to the tower."""
        works = self._works
        assert self._content is not None, "a passage runs once"
        while True:
            async with works.decoders:
                await works.tower.wait_for_room()
                started_s = works.clock()
                try:
                    with await self._open(self._content, remaining_s()) as medium:
                        if self._has_room(medium.layout.num_rows):
                            await self._decode_opened(medium, remaining_s)
                            return
                        num_rows = medium.layout.num_rows
                finally:
                    stopped_s = works.clock()
                    self._prepare_s += stopped_s - started_s
                    self.moments.prepared = _widened(self.moments.prepared, started_s, stopped_s)
            await self._wait_for_room(num_rows)

    async def _open(self, content: bytes, timeout_s: float | None) -> PooledMedia:
        with self._own_limit_named(timeout_s):
            return await self._works.pool.open(
                content,
                modality=self._modality,
                options=self._options,
                config=self._works.processor,
                key=self._key,
                timeout_s=timeout_s,
            )

    @contextmanager
    def _own_limit_named(self, timeout_s: float | None) -> Iterator[None]:
        """Who waits less than the encoder would have allowed knows why it ends; else the operator's setting does it."""
        longest_s = self._works.pool.settings.max_item_s
        try:
            yield
        except MediaDecodeTimeout as error:
            if timeout_s is not None and timeout_s < longest_s:
                raise
            raise MediaDecodeTimeout(
                f"decoding took over {longest_s:g} s, the longest this server gives to one medium (encoder.max_item_s)"
            ) from error

    async def _decode_opened(self, medium: PooledMedia, remaining_s: Callable[[], float | None]) -> None:
        works = self._works
        for _ in range(MAX_CHANGES + 1):
            self._begin(medium)
            timeout_s = remaining_s()
            try:
                with self._own_limit_named(timeout_s):
                    await works.pool.decode(
                        medium,
                        self._take_part,
                        patches_per_part=PASS_PATCHES,
                        raw=works.raw,
                        timeout_s=timeout_s,
                    )
            except MediaChanged:
                # What was made of the parts so far is void.
                await self._recall()
                if not self._has_room(medium.layout.num_rows):
                    await self._wait_for_room(medium.layout.num_rows)
            else:
                self._warnings = medium.warnings
                return
        raise MediaUndecodable("the video is damaged, and decodes to another length every time")

    def _begin(self, medium: PooledMedia) -> None:
        """Rows of which none is there yet; sound first, since it is decoded already."""
        assert self._place is not None, "there is room"
        self._failure = None
        self._rows = MediumRows(self._key, medium.layout, self._place.destination)
        if medium.mel is not None and medium.layout.num_audio_rows:
            self._submit(TowerJob.of_sound(self._rows, medium.mel))

    async def _take_part(self, part: MediaPart) -> None:
        await self._works.tower.wait_for_room()
        if self._failure is not None:
            raise self._failure
        assert self._rows is not None, "parts come after the layout"
        self._submit(TowerJob.of_part(self._rows, part))

    def _submit(self, job: TowerJob) -> None:
        ticket = self._works.tower.submit(job)
        self._tickets.add(ticket)
        ticket.done.add_done_callback(partial(self._note, ticket))

    def _note(self, ticket: Ticket, done: "asyncio.Future[TowerFailed | None]") -> None:
        self._tickets.discard(ticket)
        self._batch_wait_s = max(self._batch_wait_s, ticket.batch_wait_s)
        self._tower_s[ticket.batch] = ticket.tower_s
        entered_s = ticket.since_s + ticket.batch_wait_s
        self.moments.in_tower = _widened(self.moments.in_tower, entered_s, entered_s + ticket.tower_s)
        self._failure = self._failure or done.result()

    def _has_room(self, num_rows: int) -> bool:
        """Whether there is a place of this size, made now if possible. Raises EmbeddingTooLarge."""
        if self._place is not None and self._num_rows != num_rows:
            self._vacate()
        if self._place is None:
            self._place = self._works.room.try_reserve(self._key, num_rows)
            self._num_rows = num_rows
        return self._place is not None

    async def _wait_for_room(self, num_rows: int) -> None:
        self._place = await self._works.room.reserve(self._key, num_rows)
        self._num_rows = num_rows

    def _vacate(self) -> None:
        place, self._place, self._rows = self._place, None, None
        if place is not None:
            self._works.room.abandon(place)

    async def _leave(self) -> None:
        """Give the place back, after the tower has left it: who fails may be cancelled as well while it waits."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self._recall()
                break
            except asyncio.CancelledError as error:
                cancelled = error
        self._vacate()
        if cancelled is not None:
            raise cancelled

    async def _recall(self) -> None:
        """No job of this medium waits or is in the tower after this."""
        for ticket in list(self._tickets):
            if not ticket.in_tower:
                self._works.tower.withdraw(ticket)
                self._tickets.discard(ticket)
        await self._settle()

    async def _settle(self) -> None:
        while self._tickets:
            await asyncio.wait({ticket.done for ticket in self._tickets})


def _widened(span: tuple[float, float] | None, start_s: float, stop_s: float) -> tuple[float, float]:
    return (start_s, stop_s) if span is None else (min(span[0], start_s), max(span[1], stop_s))
