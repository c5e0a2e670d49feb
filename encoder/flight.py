"""What an encoder server has in hand: requests that wait for their reply, and the computations they wait for."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from encoder.cache.store import Entry, Reservation
from encoder.config import EncoderConfig
from encoder.errors import EncoderBusy, KeyMismatch, WireError
from encoder.passage import Moments, Passage
from encoder.types import EmbeddingRef, EncodeReply, EncodeRequest, FromEncoder, StageTimings
from encoder.wire import TensorFrame
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaUnsupported
from preprocess.keys import media_key
from preprocess.types import MediaKey, Modality

Reply = Callable[[FromEncoder, Sequence[TensorFrame]], None]


@dataclass(slots=True, eq=False)
class Waiter:
    """One admitted request. The server forgets it when its single reply is sent."""

    request: EncodeRequest
    peer: str
    reply: Reply
    admitted_s: float
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Flight:
    """The one computation of a key that is not cached, and everyone who waits for it."""

    key: MediaKey
    passage: Passage[Reservation] | None
    """None as long as everyone who waits knows the key alone: then it is looked for and not computed."""
    waiters: list[Waiter] = field(default_factory=list)
    is_unsure: bool = False
    """The arena was locked when it was asked whether it has this key."""
    is_cached: bool = False
    """The second tier had it."""
    task: "asyncio.Task[None] | None" = None

    @property
    def content_bytes(self) -> int:
        """What waits to be decoded."""
        return 0 if self.passage is None else self.passage.content_bytes

    @property
    def is_landing(self) -> bool:
        """What is left cannot be stopped, and is worth keeping."""
        return self.passage is not None and self.passage.is_landing

    @property
    def timings(self) -> StageTimings:
        """Of what has been done so far."""
        return StageTimings() if self.passage is None else self.passage.timings

    @property
    def moments(self) -> Moments | None:
        """When it was done."""
        return None if self.passage is None else self.passage.moments


def verified_content(
    request: EncodeRequest,
    tensors: Sequence[TensorFrame],
    *,
    config: EncoderConfig,
    modalities: Sequence[Modality],
    processor: ProcessorConfig,
    fingerprint: str,
    waiting_bytes: int,
) -> bytes:
    """The content of a request that is worth a flight; `waiting_bytes` of other content wait to be decoded.

    Raises MediaUnsupported, WireError, EncoderBusy, KeyMismatch.
    """
    if request.modality not in modalities:
        raise MediaUnsupported(f"this model has no tower for {request.modality}")
    if len(tensors) != 1 or tensors[0].dtype != "uint8":
        raise WireError("an encode request carries its content as one uint8 frame")
    if waiting_bytes and waiting_bytes + tensors[0].data.nbytes > config.max_pending_bytes:
        limit = f"{waiting_bytes} bytes of media wait to be decoded"
        raise EncoderBusy(limit, retry_after_s=config.retry_after_s)
    content = bytes(tensors[0].data)
    expected = media_key(
        content,
        modality=request.modality,
        options=request.options,
        processor=processor,
        tower_fingerprint=fingerprint,
    )
    if expected != request.key:
        # The key decides what others get from the cache: it is never taken on trust.
        raise KeyMismatch(f"key {request.key} was given, this encoder computes {expected}")
    return content


def reply_of(waiter: Waiter, ref: EmbeddingRef, entry: Entry, flight: Flight | None, now_s: float) -> EncodeReply:
    """The answer to a request for what is in the arena; without a flight it was there when the request came."""
    timings = StageTimings() if flight is None else flight.timings
    spent_s = timings.prepare_s + timings.batch_wait_s + timings.tower_s
    return EncodeReply(
        request_id=waiter.request.request_id,
        key=ref.key,
        layout=entry.layout,
        ref=ref,
        cached=flight is None or flight.is_cached,
        timings=replace(timings, queue_s=max(0.0, now_s - waiter.admitted_s - spent_s)),
        warnings=entry.warnings,
    )
