"""One part as the two frames that travel: its media's rows one after the other, and what a prompt needs to hold them.

Frame 1 of one medium is the memory of its rows themselves. Of several it is one copy, and their leases end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from encoder.sglang.config import SglangConfig
from encoder.sglang.errors import DialectError
from encoder.sglang.pickles import Global, Names, Tensor, write_header
from encoder.wire import Buffer
from preprocess.types import MediaLayout, MediaSource, Modality

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Encoded(Protocol):
    """One medium, its rows under a lease."""

    @property
    def layout(self) -> MediaLayout: ...
    @property
    def dtype(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def rows(self) -> memoryview:
        """Bytes of `[num_rows, width]`, C order."""

    def release(self) -> None:
        """End the lease; may be called again."""


class Desk(Protocol):
    """Where media are encoded; `encoder.front.desk.EncodeDesk` is one."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What can be encoded. Raises EncoderUnavailable while that is not known."""

    async def encode(
        self, source: MediaSource, *, asker: Hashable, deadline_unix_s: float, sha256: bytes | None = None
    ) -> Encoded:
        """Raises MediaError, EncoderError. `sha256`: what the content must have as its digest."""


@dataclass(frozen=True, slots=True)
class PartId:
    """Which part of which request a message belongs to."""

    req_id: str
    num_parts: int
    part_idx: int
    modality: Modality


class Hold:
    """Counts those who still read leased rows, and ends the leases after the last."""

    def __init__(self, encoded: Sequence[Encoded] = (), on_change: Callable[[int], None] | None = None) -> None:
        """`on_change` is told how many leases more or fewer there are."""
        self._encoded = list(encoded)
        self._num_users = 0
        self._on_change = on_change
        self._changed(len(self._encoded))

    def take(self) -> Callable[[], None]:
        """One user more. Call what is returned when it reads no longer; once is enough and more is harmless."""
        self._num_users += 1
        pending = [self._drop]

        def drop() -> None:
            if pending:
                pending.pop()()

        return drop

    def _drop(self) -> None:
        self._num_users -= 1
        if self._num_users:
            return
        encoded, self._encoded = self._encoded, []
        for medium in encoded:
            medium.release()
        self._changed(-len(encoded))

    def _changed(self, change: int) -> None:
        if self._on_change is not None:
            self._on_change(change)


class Writer:
    """Header frames for one release of the reader."""

    def __init__(self, config: SglangConfig) -> None:
        self._names = Names(
            embedding_data=Global(config.embedding_data_module, "EmbeddingData"),
            modality=Global(config.modality_module, "Modality"),
        )

    def data(self, part: PartId, media: Sequence[Encoded]) -> tuple[bytes, Buffer]:
        """Header and rows, `[sum of rows, width]`, of the part's media in order.

        Rows of one medium are not copied. Raises DialectError for media that do not fit together.
        """
        first = media[0]
        if any((medium.dtype, medium.width) != (first.dtype, first.width) for medium in media):
            raise DialectError("the media of this part were encoded by towers of different shapes")
        num_rows = sum(_num_own_rows(medium.layout) for medium in media)
        attributes = _attributes(part) | {
            "grid_dim": _grids(part.modality, media),
            "shape": [num_rows, first.width],
            "dtype": Global("torch", first.dtype),
        }
        if part.modality is Modality.VIDEO:
            attributes |= _video_attributes(media)
        views = [_own_rows(medium) for medium in media]
        rows: Buffer = views[0] if len(views) == 1 else b"".join(views)
        return write_header(self._names, part.modality.value, attributes), rows

    def failure(self, part: PartId, error: DialectError) -> bytes:
        """The one frame of a part that is not coming."""
        attributes = _attributes(part) | {"error_msg": error.message, "error_code": error.status}
        return write_header(self._names, part.modality.value, attributes)


def _attributes(part: PartId) -> dict[str, object]:
    """All that a reader may look for, empty where there is nothing to say."""
    return {
        "req_id": part.req_id,
        "num_parts": part.num_parts,
        "part_idx": part.part_idx,
        "grid_dim": None,
        "embedding": None,
        "send_time": None,
        "dtype": None,
        "shape": None,
        "error_msg": None,
        "error_code": None,
    }


def _num_own_rows(layout: MediaLayout) -> int:
    """Rows of frame 1: the sound of a video travels in the header."""
    return layout.num_rows if layout.modality is Modality.AUDIO else layout.num_vision_tokens


def _row_bytes(medium: Encoded) -> int:
    return medium.width * DTYPE_BYTES[medium.dtype]


def _own_rows(medium: Encoded) -> memoryview:
    return medium.rows.cast("B")[: _num_own_rows(medium.layout) * _row_bytes(medium)]


def _sound_rows(medium: Encoded) -> memoryview:
    return medium.rows.cast("B")[_num_own_rows(medium.layout) * _row_bytes(medium) :]


def _grids(modality: Modality, media: Sequence[Encoded]) -> object:
    """Patches along time, height and width before merging, one list a medium; of sounds a tensor of their rows."""
    if modality is Modality.AUDIO:
        return Tensor.of_ints(tuple(medium.layout.num_audio_rows for medium in media))
    return [list(medium.layout.grid_thw or ()) for medium in media]


def _video_attributes(media: Sequence[Encoded]) -> dict[str, object]:
    """Times of all pairs of all videos in one list, and the sound of those that have any.

    A silent video counts as 0 units also where no video of the part has sound: the reader chains the counts of all
    parts, and a part that left them out would shift those after it.
    """
    sounding = [medium for medium in media if medium.layout.num_audio_rows]
    attributes: dict[str, object] = {
        "video_timestamps": [time_s for medium in media for time_s in medium.layout.timestamps_s],
        "second_per_grid_ts": None,
        "video_audio_per_video_num_units": [
            len(medium.layout.audio_slices) if medium.layout.num_audio_rows else 0 for medium in media
        ],
    }
    if not sounding:
        return attributes
    first = sounding[0]
    slices = [medium.layout.audio_slices for medium in sounding]
    num_rows = sum(medium.layout.num_audio_rows for medium in sounding)
    return attributes | {
        "video_audio_segment_lens_flat": [length for units in slices for _, length in units],
        # Of the whole track as far as frames go; what lies behind the last frame is not encoded into any row.
        "video_audio_feature_lens": Tensor.of_ints(
            tuple(max(start + length for start, length in units) for units in slices)
        ),
        "video_audio_embedding": Tensor(
            first.dtype, (num_rows, first.width), b"".join(_sound_rows(medium) for medium in sounding)
        ),
    }
