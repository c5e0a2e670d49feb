"""Framing shared by every socket of the pipeline: one header frame, then one raw frame per tensor.

    frame 0   msgpack: {v: version, b: message, t: [{dtype, shape, size_bytes, checksum}, ...]}
    frame 1+  the bytes of each tensor, C order

No pickle anywhere: a frame is either data we can describe or refused with `WireError`. Checksums are xxh3-64 of the
bytes, so a truncated or foreign frame cannot pass for an embedding or a KV page.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import xxhash

from encoder.errors import WireError

WIRE_VERSION = 1

Buffer = bytes | bytearray | memoryview

_DTYPE_BYTES = {
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
}

MessageT = TypeVar("MessageT")


class TensorHeader(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    checksum: int


class _Header(msgspec.Struct, frozen=True):
    v: int
    b: msgspec.Raw
    t: tuple[TensorHeader, ...] = ()


class TensorFrame:
    """One tensor on the wire: dtype name, shape, bytes in C order. Numpy and torch meet here as strangers."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        if dtype not in _DTYPE_BYTES:
            raise WireError(f"tensor dtype {dtype!r} cannot be sent; known: {sorted(_DTYPE_BYTES)}")
        view = memoryview(data).cast("B")
        expected_bytes = _DTYPE_BYTES[dtype]
        for extent in shape:
            expected_bytes *= extent
        if view.nbytes != expected_bytes:
            raise WireError(f"tensor {dtype}{list(shape)} needs {expected_bytes} bytes, frame holds {view.nbytes}")
        self.dtype = dtype
        self.shape = shape
        self.data = view

    @classmethod
    def of_bytes(cls, content: Buffer) -> "TensorFrame":
        """Wrap opaque content (a file's bytes) as a uint8 vector."""
        return cls("uint8", (memoryview(content).nbytes,), content)


class Codec(Generic[MessageT]):
    """Encodes and decodes one family of messages: a union of tagged msgspec structs."""

    def __init__(self, message_type: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._header = msgspec.msgpack.Decoder(_Header)
        self._body: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: object, tensors: Sequence[TensorFrame] = ()) -> list[Buffer]:
        """Message and tensors to frames. The tensor frames alias the caller's memory: keep it unchanged until sent."""
        headers = tuple(
            TensorHeader(
                dtype=frame.dtype,
                shape=frame.shape,
                size_bytes=frame.data.nbytes,
                checksum=xxhash.xxh3_64_intdigest(frame.data),
            )
            for frame in tensors
        )
        header = _Header(WIRE_VERSION, msgspec.Raw(self._encoder.encode(message)), headers)
        return [self._encoder.encode(header), *(frame.data for frame in tensors)]

    def decode(self, frames: Sequence[Buffer]) -> tuple[MessageT, list[TensorFrame]]:
        """Frames to message and tensors (aliasing the frames). Raises WireError on anything that does not fit."""
        if not frames:
            raise WireError("empty message: no header frame")
        try:
            header = self._header.decode(frames[0])
        except msgspec.MsgspecError as error:
            raise WireError(f"header frame is not a message: {error}") from error
        if header.v != WIRE_VERSION:
            raise WireError(f"wire version {header.v} is not supported; this process speaks {WIRE_VERSION}")
        if len(header.t) != len(frames) - 1:
            raise WireError(f"header announces {len(header.t)} tensors, message carries {len(frames) - 1}")
        tensors = []
        for described, frame in zip(header.t, frames[1:], strict=True):
            tensor = TensorFrame(described.dtype, described.shape, frame)
            if tensor.data.nbytes != described.size_bytes:
                raise WireError(f"tensor frame holds {tensor.data.nbytes} bytes, header says {described.size_bytes}")
            if xxhash.xxh3_64_intdigest(tensor.data) != described.checksum:
                raise WireError(f"checksum of a {described.dtype}{list(described.shape)} tensor does not match")
            tensors.append(tensor)
        try:
            message = self._body.decode(header.b)
        except msgspec.MsgspecError as error:
            raise WireError(f"message body does not fit its type: {error}") from error
        return message, tensors
