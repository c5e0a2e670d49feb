"""The messages of the encoder stage and the reference by which an embedding travels.

Everything here is msgspec and plain Python: the gateway imports this module and must not pay for torch.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from preprocess.config import VideoBackend
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality

# Processes that share an arena lock it for microseconds, and one that was killed with the lock is gone within a second:
# a replica that finds it locked for longer serves nothing until somebody looks.
ARENA_STUCK_AFTER_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Who an encoder is: its name, this start of the process, and the weights it runs."""

    name: str
    incarnation: str
    fingerprint: str


class EmbeddingRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names the rows of one medium in a shared-memory arena; holds them alive through `lease_id`, carries no bytes.

    The tensor is `[num_rows, width]`, contiguous, at `offset_bytes` of the segment `arena`. `checksum` is xxh3-64 of
    its bytes. A reader that finds another checksum or no such segment must treat the embedding as lost and ask again,
    unless `source` names where its rows can be had as frames (see `FetchRows`): the ZMQ address of the replica that
    gave the reference, as its client reaches it; empty when only this host could reach it.
    """

    key: MediaKey
    arena: str
    offset_bytes: int
    num_rows: int
    width: int
    dtype: str
    checksum: int
    lease_id: str
    source: str = ""

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.width * (2 if self.dtype in ("bfloat16", "float16") else 4)


class StageTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds one medium spent in each step of the encoder; all zero on a cache hit except `queue_s`.

    A long video is in the tower and still being decoded at the same time, so the steps may add up to more than passed.
    `batch_wait_s` is the longest wait of one of its parts.
    """

    queue_s: float = 0.0
    prepare_s: float = 0.0
    batch_wait_s: float = 0.0
    tower_s: float = 0.0


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """Ask for the embedding of one medium. The content travels as the first tensor frame (uint8), never in here.

    `key` was computed by the sender from the content, the options and the encoder's own fingerprint. `inline` asks
    for the rows as a tensor frame in the reply, for a reader that cannot map the arena (another host). `traceparent`
    (W3C) is the span this is a part of, and `tracestate` what comes with it; empty where nobody traces.

    With `key_only` the sender has no content, and no frame comes. It is answered from the arena, the second tier or a
    computation that is under way; else the failure is `unknown_media`, and the options say nothing.
    """

    request_id: str
    key: MediaKey
    modality: Modality
    options: MediaOptions
    deadline_unix_s: float
    inline: bool = False
    key_only: bool = False
    traceparent: str = ""
    tracestate: str = ""


class EncodeReply(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    request_id: str
    key: MediaKey
    layout: MediaLayout
    ref: EmbeddingRef
    cached: bool
    timings: StageTimings
    warnings: tuple[str, ...] = ()


class EncodeFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The one reply of a request that could not be served. `status` is the HTTP status it maps to."""

    request_id: str
    code: str
    message: str
    status: int
    retry_after_s: float | None = None
    needed_bytes: int | None = None
    """Of a full arena: what the embedding takes."""


class CancelEncode(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    request_id: str


class ReleaseLeases(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    lease_ids: tuple[str, ...]


class KeepLeases(msgspec.Struct, frozen=True, kw_only=True, tag="keep"):
    """All that the sender still holds of what it was given on this connection and on those it replaces.

    The first word on a connection that is there again. What was given in replies that were lost, or given back to a
    process that was killed before it read of it, ends here instead of at its deadline.
    """

    lease_ids: tuple[str, ...]


class FetchRows(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_rows"):
    """Ask for the rows of a reference, for a reader that cannot map its arena (another host).

    The reference's lease keeps them. Answered with `Rows`, or with `EncodeFailure` when they are gone.
    """

    request_id: str
    key: MediaKey
    checksum: int


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag="rows"):
    """The rows of one embedding as the message's one tensor frame, `[num_rows, width]`."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    sequence: int


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag="farewell"):
    """A server's word before it ends, to a peer it has answered: all is said, and it goes when this is answered."""

    sequence: int


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The answer to `Farewell`. Everything before it was read, and no request follows on this connection."""

    sequence: int


class HistogramCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram since the start of its process: `counts[i]` values were above bound i-1 and not above bound i, the
    last ones above all bounds. `total` is their sum."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    labels: dict[str, str] = {}


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    """Answer to `Ping`: who the encoder is and how loaded. `incarnation` changes with every start of the process."""

    sequence: int
    replica: str
    incarnation: str
    fingerprint: str
    width: int
    dtype: str
    modalities: tuple[Modality, ...]
    num_pending: int
    num_cached: int
    cached_bytes: int
    capacity_bytes: int
    leased_bytes: int
    ready: bool
    counters: dict[str, float] = {}
    histograms: tuple[HistogramCounts, ...] = ()
    tower_busy_s: float = 0.0
    """How long the batch that is in the tower has been there; zero for an idle one."""
    wedged: bool = False
    """The batch has been in the tower for longer than `EncoderConfig.wedged_after_s`."""
    arena_locked_s: float = 0.0
    """For how long another process has kept the arena locked, so that nothing can be served; 0 when it is not."""
    page_bytes: int = 1
    """An embedding takes a multiple of this."""
    arena: str = ""
    """The shared memory its embeddings are in; encoders of one host share it, and with it the bytes counted here."""
    video_backend: VideoBackend = "pyav"
    """Part of the key of a video; see `preprocess.config.ProcessorConfig`."""


ToEncoder = EncodeRequest | CancelEncode | ReleaseLeases | KeepLeases | FetchRows | Ping | Goodbye
FromEncoder = EncodeReply | EncodeFailure | Rows | EncoderInfo | Farewell
