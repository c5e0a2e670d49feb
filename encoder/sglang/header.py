"""What frame 0 says, as a value: every field checked before anything relies on it.

For a reader of stock encoders' messages; see `encoder.sglang.unpickle` for how the frame is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder.sglang.errors import HeaderRefused
from encoder.sglang.pickles import STORAGES, Global, Names, Tensor
from encoder.sglang.unpickle import ModalityName, read_attributes


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of its part. Attributes that are not known are dropped."""

    req_id: str
    num_parts: int | None = None
    part_idx: int | None = None
    modality: str | None = None
    """image, video or audio."""
    shape: tuple[int, int] | None = None
    dtype: str | None = None
    grid: tuple[tuple[int, ...], ...] = ()
    """Per medium; of sounds one number each."""
    video_timestamps: tuple[float, ...] = ()
    audio_units: tuple[int, ...] = ()
    audio_lengths: tuple[int, ...] = ()
    audio_rows: Tensor | None = None
    error_msg: str | None = None
    error_code: int | None = None


def read_header(frame: bytes, names: Names, *, max_bytes: int = 1 << 20) -> Header:
    """Raises HeaderRefused."""
    if len(frame) > max_bytes:
        raise HeaderRefused(f"the header has {len(frame)} bytes, allowed are {max_bytes}")
    return _header(read_attributes(frame, names))


def check_rows(header: Header, num_bytes: int) -> None:
    """Whether frame 1 is what the header says. Raises HeaderRefused."""
    if header.shape is None or header.dtype is None:
        raise HeaderRefused("the header names no shape and dtype")
    expected_bytes = math.prod(header.shape) * STORAGES[header.dtype][1]
    if num_bytes != expected_bytes:
        raise HeaderRefused(f"the rows have {num_bytes} bytes, their shape {list(header.shape)} takes {expected_bytes}")


def _header(state: Mapping[str, object]) -> Header:
    req_id = state.get("req_id")
    if not isinstance(req_id, str):
        raise HeaderRefused("req_id is no text")
    shape = state.get("shape")
    if shape is not None and not (
        isinstance(shape, (list, tuple))
        and len(shape) == 2
        and all(type(extent) is int and extent >= 0 for extent in shape)
    ):
        raise HeaderRefused("shape is not two counts")
    modality, dtype = state.get("modality"), state.get("dtype")
    embedding = state.get("video_audio_embedding")
    return Header(
        req_id=req_id,
        num_parts=_of(int, state, "num_parts"),
        part_idx=_of(int, state, "part_idx"),
        modality=modality.name if isinstance(modality, ModalityName) else None,
        shape=(shape[0], shape[1]) if isinstance(shape, (list, tuple)) else None,
        dtype=dtype.name if isinstance(dtype, Global) else None,
        grid=_grid(state.get("grid_dim")),
        video_timestamps=_numbers(state.get("video_timestamps"), float),
        audio_units=_numbers(state.get("video_audio_per_video_num_units"), int),
        audio_lengths=_numbers(state.get("video_audio_segment_lens_flat"), int),
        audio_rows=embedding if isinstance(embedding, Tensor) else None,
        error_msg=_of(str, state, "error_msg"),
        error_code=_of(int, state, "error_code"),
    )


def _of(kind: type[Any], state: Mapping[str, object], name: str) -> Any:
    value = state.get(name)
    if value is not None and type(value) is not kind:
        raise HeaderRefused(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _numbers(value: object, kind: type[Any]) -> tuple[Any, ...]:
    items = ints_of(value) if isinstance(value, Tensor) else value
    if items is None:
        return ()
    if not isinstance(items, (list, tuple)) or not all(type(item) in (int, kind) for item in items):
        raise HeaderRefused(f"a list of {kind.__name__} is something else")
    return tuple(kind(item) for item in items)


def _grid(value: object) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if isinstance(value, Tensor):
        flat = ints_of(value)
        width = value.shape[-1] if len(value.shape) > 1 else 1
        return tuple(tuple(flat[start : start + width]) for start in range(0, len(flat), max(width, 1)))
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise HeaderRefused("grid_dim is no list of lists")
    return tuple(_numbers(row, int) for row in value)


def ints_of(tensor: Tensor) -> list[int]:
    """The elements of an int64 tensor. Raises HeaderRefused for another."""
    if tensor.dtype != "int64":
        raise HeaderRefused(f"a tensor of counts is {tensor.dtype}")
    return memoryview(tensor.content).cast("B").cast("q").tolist()
