"""Frame 0 of a message: a pickle that the stock reader accepts, written here without SGLang and without torch.

    data     EmbeddingData with grid, shape, dtype and, for videos, times and sound
    failure  EmbeddingData with error_msg and error_code

Of all that a pickle can say these use the six names a stock header uses, and torch's dtypes and storages:

    EmbeddingData, Modality, torch.<dtype>, torch._utils._rebuild_tensor_v2, torch.storage._load_from_bytes,
    collections.OrderedDict

Protocol 4, without a memo. A tensor is its storage in torch's old file format, inside the pickle as bytes.
"""

import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from encoder.wire import Buffer

MODALITY_NUMBERS: Final = {"image": 1, "video": 2, "audio": 3}
STORAGES: Final[Mapping[str, tuple[str, int]]] = {
    "bfloat16": ("BFloat16Storage", 2),
    "float16": ("HalfStorage", 2),
    "float32": ("FloatStorage", 4),
    "int64": ("LongStorage", 8),
}
"""By dtype: the storage class in module torch, and bytes per element."""
LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
LEGACY_VERSION: Final = 1001
_INT32: Final = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor in host memory."""

    dtype: str
    shape: tuple[int, ...]
    content: Buffer
    """C order, little-endian."""

    def __post_init__(self) -> None:
        expected_bytes = math.prod(self.shape) * STORAGES[self.dtype][1]
        if memoryview(self.content).nbytes != expected_bytes:
            raise ValueError(
                f"tensor {self.dtype}{list(self.shape)} needs {expected_bytes} bytes, it has "
                f"{memoryview(self.content).nbytes}"
            )

    @classmethod
    def of_ints(cls, values: tuple[int, ...]) -> "Tensor":
        """A vector of int64."""
        return cls("int64", (len(values),), struct.pack(f"<{len(values)}q", *values))


@dataclass(frozen=True, slots=True)
class _Call:
    function: Global
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """Where the reader has its two classes."""

    embedding_data: Global
    modality: Global


def write_header(names: Names, modality: str, attributes: Mapping[str, object]) -> bytes:
    """An EmbeddingData of these attributes, and of `modality`: image, video or audio.

    Values are None, bool, int, float, str, lists and tuples of them, `Tensor` and `Global`; anything else is a
    TypeError.
    """
    state = dict(attributes) | {"modality": _Call(names.modality, (MODALITY_NUMBERS[modality],))}
    writer = _Writer(4)
    writer.put_global(names.embedding_data)
    # An instance without a call of its constructor, then its dict in one step.
    writer.raw(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
    writer.put_dict(state)
    writer.raw(pickle.BUILD)
    return writer.finish()


class _Writer:
    """Opcodes of one pickle, in the order in which a reader's stack machine takes them."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._chunks: list[Buffer] = [pickle.PROTO + bytes([protocol])]

    def raw(self, opcodes: Buffer) -> None:
        self._chunks.append(opcodes)

    def finish(self) -> bytes:
        return b"".join((*self._chunks, pickle.STOP))

    def put(self, value: object) -> None:
        match value:
            case None:
                self.raw(pickle.NONE)
            case bool():
                self.raw(pickle.NEWTRUE if value else pickle.NEWFALSE)
            case int():
                self._put_int(value)
            case float():
                self.raw(pickle.BINFLOAT + struct.pack(">d", value))
            case str():
                # A lone surrogate, which JSON can say, travels as pickle's own writer lets it.
                text = value.encode("utf-8", "surrogatepass")
                self.raw(pickle.BINUNICODE + struct.pack("<I", len(text)) + text)
            case bytes():
                self.raw(pickle.BINBYTES + struct.pack("<I", len(value)))
                self.raw(value)
            case list():
                self.raw(pickle.EMPTY_LIST + pickle.MARK)
                self._put_all(value)
                self.raw(pickle.APPENDS)
            case tuple():
                self.raw(pickle.MARK)
                self._put_all(value)
                self.raw(pickle.TUPLE)
            case Global():
                self.put_global(value)
            case Tensor():
                self.put(_rebuilding(value))
            case _Call():
                self.put_global(value.function)
                self.put(value.arguments)
                self.raw(pickle.REDUCE)
            case _:
                raise TypeError(f"{type(value).__name__} has no place in a header")

    def put_global(self, name: Global) -> None:
        if self._protocol < 4:
            self.raw(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())
            return
        self.put(name.module)
        self.put(name.name)
        self.raw(pickle.STACK_GLOBAL)

    def put_dict(self, state: Mapping[str, object]) -> None:
        self.raw(pickle.EMPTY_DICT + pickle.MARK)
        for key, value in state.items():
            self.put(key)
            self.put(value)
        self.raw(pickle.SETITEMS)

    def _put_all(self, values: list[object] | tuple[object, ...]) -> None:
        for value in values:
            self.put(value)

    def _put_int(self, value: int) -> None:
        if value in _INT32:
            self.raw(pickle.BININT + struct.pack("<i", value))
            return
        size_bytes = value.bit_length() // 8 + 1
        self.raw(pickle.LONG1 + bytes([size_bytes]) + value.to_bytes(size_bytes, "little", signed=True))


def _rebuilding(tensor: Tensor) -> _Call:
    strides, stride = [], 1
    for extent in reversed(tensor.shape):
        strides.append(stride)
        stride *= extent
    storage = _Call(Global("torch.storage", "_load_from_bytes"), (_storage(tensor),))
    hooks = _Call(Global("collections", "OrderedDict"), ())
    return _Call(
        Global("torch._utils", "_rebuild_tensor_v2"),
        (storage, 0, tensor.shape, tuple(reversed(strides)), False, hooks),
    )


def _storage(tensor: Tensor) -> bytes:
    """The elements as a file of torch's format before zip: four pickles and the keys, then counts and contents."""
    name, element_bytes = STORAGES[tensor.dtype]
    content = memoryview(tensor.content).cast("B")
    num_elements = content.nbytes // element_bytes
    reference = _Writer(2)
    reference.put(("storage", Global("torch", name), "0", "cpu", num_elements, None))
    reference.raw(pickle.BINPERSID)
    system = {
        "protocol_version": LEGACY_VERSION,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    return b"".join(
        (
            pickle.dumps(LEGACY_MAGIC, protocol=2),
            pickle.dumps(LEGACY_VERSION, protocol=2),
            pickle.dumps(system, protocol=2),
            reference.finish(),
            pickle.dumps(["0"], protocol=2),
            struct.pack("<q", num_elements),
            content,
        )
    )
