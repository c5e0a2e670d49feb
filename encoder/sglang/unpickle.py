"""Frame 0 read without an unpickler: a stack machine of its own that can build values and nothing else.

Six names mean something, each an inert stand-in; every other name ends the reading:

    EmbeddingData -> the attributes          Modality -> the name of the modality     torch.<dtype> -> the dtype's name
    _rebuild_tensor_v2, _load_from_bytes -> a `Tensor` of bytes                       OrderedDict -> an empty dict

Nothing is imported and nothing called, whatever the pickle says. Sizes, steps and depths are bounded.
"""

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from encoder.sglang.errors import HeaderRefused
from encoder.sglang.pickles import LEGACY_MAGIC, LEGACY_VERSION, MODALITY_NUMBERS, STORAGES, Global, Names, Tensor

DTYPES: Final = frozenset(STORAGES)
_MAX_STEPS: Final = 200_000
_MAX_DEPTH: Final = 8
_REBUILD: Final = Global("torch._utils", "_rebuild_tensor_v2")
_LOAD: Final = Global("torch.storage", "_load_from_bytes")
_ORDERED: Final = Global("collections", "OrderedDict")
_MODALITIES: Final = {number: name for name, number in MODALITY_NUMBERS.items()}


def read_attributes(frame: bytes, names: Names) -> dict[str, object]:
    """The attributes of the EmbeddingData that a frame holds, by name. Raises HeaderRefused.

    Values are those of `encoder.sglang.pickles.write_header`, a modality being a `ModalityName`.
    """
    value, end = _Machine(names).run(frame)
    if end != len(frame):
        raise HeaderRefused("the header goes on after its end")
    if not isinstance(value, _Instance):
        raise HeaderRefused("the header is no EmbeddingData")
    return value.state


@dataclass(slots=True, eq=False)
class _Instance:
    """An object that was made without a call."""

    state: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ModalityName:
    """A member of Modality."""

    name: str
    """image, video or audio."""


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    dtype: str
    content: bytes


class _Mark:
    """Where the items of a tuple, list or dict begin."""


_MARK: Final = _Mark()


class _Machine:
    """Runs one pickle. Opcodes that are not in the table are refused."""

    def __init__(self, names: Names | None) -> None:
        """With None the pickle is one of a tensor's storage, where only storage classes are known."""
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes, start: int = 0) -> tuple[object, int]:
        """The value of the pickle that begins there, and where it ends. Raises HeaderRefused."""
        reader = _Reader(content, start)
        try:
            for _ in range(_MAX_STEPS):
                opcode = reader.take(1)
                if opcode == pickle.STOP:
                    break
                self._step(opcode, reader)
            else:
                raise HeaderRefused(f"the header takes more than {_MAX_STEPS} steps")
        except (ValueError, IndexError, KeyError) as error:
            raise HeaderRefused(f"the header is no pickle: {error}") from error
        if len(self._stack) != 1:
            raise HeaderRefused("the header ends with more or less than one value")
        return self._stack[0], reader.position

    def _step(self, opcode: bytes, reader: "_Reader") -> None:
        if opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode]())
        elif opcode in _LITERALS:
            self._stack.append(_LITERALS[opcode](reader))
        elif opcode in _COMMANDS:
            _COMMANDS[opcode](self)
        elif opcode in _INDEXED:
            read, command = _INDEXED[opcode]
            command(self, read(reader))
        elif opcode == pickle.GLOBAL:
            self._push_global(reader.line(), reader.line())
        else:
            raise HeaderRefused(f"the header holds the opcode {opcode!r}")

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _since_mark(self) -> list[Any]:
        start = len(self._stack) - 1
        while self._stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise HeaderRefused("the header ends a list that it did not begin")
        items = self._stack[start + 1 :]
        del self._stack[start:]
        return items

    def _tuple(self) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _short_tuple(self, length: int) -> None:
        items = tuple(self._stack[-length:])
        if len(items) != length:
            raise HeaderRefused("the header takes more values than it has")
        del self._stack[-length:]
        self._stack.append(items)

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise HeaderRefused("the header appends to what is no list")
        self._stack[-1].extend(items)

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict) or not all(isinstance(key, str) for key in items[::2]):
            raise HeaderRefused("the header sets items of what is no dict, or with keys that are no text")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise HeaderRefused("the header names something by what is no text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        self._stack.append(self._resolve(Global(module, name)))

    def _resolve(self, name: Global) -> Global:
        """The name itself, if it is one of the six. It stands for nothing but itself."""
        if self._names is None:
            known = name.module == "torch" and any(name.name == storage for storage, _ in STORAGES.values())
        else:
            known = name in (self._names.embedding_data, self._names.modality, _REBUILD, _LOAD, _ORDERED) or (
                name.module == "torch" and name.name in DTYPES
            )
        if not known:
            raise HeaderRefused(f"the header names {name.module}.{name.name}"[:200])
        return name

    def _newobj(self) -> None:
        arguments, of = self._stack.pop(), self._stack.pop()
        if self._names is None or of != self._names.embedding_data or arguments != ():
            raise HeaderRefused("the header makes an object of what is no EmbeddingData")
        self._stack.append(_Instance())

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, _Instance) or not isinstance(state, dict):
            raise HeaderRefused("the header sets the state of what is no EmbeddingData")
        target.state = state

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple) or not isinstance(function, Global):
            raise HeaderRefused("the header calls what is no name")
        self._stack.append(self._stand_in(function, arguments))

    def _stand_in(self, function: Global, arguments: tuple[Any, ...]) -> object:
        match function, arguments:
            case Global("collections", "OrderedDict"), ():
                return {}
            case Global("torch.storage", "_load_from_bytes"), (bytes() as content,):
                return _read_storage(content)
            case Global("torch._utils", "_rebuild_tensor_v2"), (
                _Storage() as storage,
                int() as start,
                shape,
                strides,
                *_,
            ):
                return _tensor(storage, start, shape, strides)
            case _, (int() as number,) if self._names is not None and function == self._names.modality:
                return ModalityName(_MODALITIES[number])
        raise HeaderRefused(f"the header calls {function.module}.{function.name} with other arguments than ours")

    def _persistent(self) -> None:
        """torch's reference to a storage, in a storage's own pickle only."""
        match self._stack.pop():
            case ("storage", Global(name=name), str() as key, "cpu", int() as num_elements, None) if (
                self._names is None and num_elements >= 0
            ):
                dtype = next(dtype for dtype, (storage, _) in STORAGES.items() if storage == name)
                self._stack.append(_Reference(dtype, key, num_elements))
            case _:
                raise HeaderRefused("the header refers to what is no storage in host memory")


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    dtype: str
    key: str
    num_elements: int


class _Reader:
    """Arguments of opcodes, read from one pickle. Raises HeaderRefused at its end."""

    def __init__(self, content: bytes, position: int) -> None:
        self._content = content
        self.position = position

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._content):
            raise HeaderRefused("the header breaks off")
        taken = self._content[self.position : end]
        self.position = end
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def sized(self, form: str) -> bytes:
        return self.take(self.number(form))

    def text(self, form: str) -> str:
        return self.sized(form).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        end = self._content.index(b"\n", self.position)
        line = self.take(end - self.position)
        self.position += 1
        return line.decode()


_CONSTANTS: Final[Mapping[bytes, Callable[[], object]]] = {
    pickle.NONE: lambda: None,
    pickle.NEWTRUE: lambda: True,
    pickle.NEWFALSE: lambda: False,
    pickle.EMPTY_TUPLE: tuple,
    pickle.EMPTY_LIST: list,
    pickle.EMPTY_DICT: dict,
    pickle.MARK: lambda: _MARK,
}
_LITERALS: Final[Mapping[bytes, Callable[[_Reader], object]]] = {
    pickle.BININT: lambda reader: reader.number("<i"),
    pickle.BININT1: lambda reader: reader.number("<B"),
    pickle.BININT2: lambda reader: reader.number("<H"),
    pickle.LONG1: lambda reader: int.from_bytes(reader.sized("<B"), "little", signed=True),
    pickle.BINFLOAT: lambda reader: reader.number(">d"),
    pickle.BINUNICODE: lambda reader: reader.text("<I"),
    pickle.SHORT_BINUNICODE: lambda reader: reader.text("<B"),
    pickle.BINBYTES: lambda reader: reader.sized("<I"),
    pickle.SHORT_BINBYTES: lambda reader: reader.sized("<B"),
}
_COMMANDS: Final[Mapping[bytes, Callable[[_Machine], None]]] = {
    pickle.MEMOIZE: _Machine._memoize,
    pickle.TUPLE: _Machine._tuple,
    pickle.TUPLE1: lambda machine: machine._short_tuple(1),
    pickle.TUPLE2: lambda machine: machine._short_tuple(2),
    pickle.TUPLE3: lambda machine: machine._short_tuple(3),
    pickle.APPEND: _Machine._append,
    pickle.APPENDS: _Machine._appends,
    pickle.SETITEM: _Machine._setitem,
    pickle.SETITEMS: _Machine._setitems,
    pickle.STACK_GLOBAL: _Machine._stack_global,
    pickle.NEWOBJ: _Machine._newobj,
    pickle.BUILD: _Machine._build,
    pickle.REDUCE: _Machine._reduce,
    pickle.BINPERSID: _Machine._persistent,
}
_INDEXED: Final[Mapping[bytes, tuple[Callable[[_Reader], int], Callable[[_Machine, int], None]]]] = {
    # How the pickle is written, not what it says.
    pickle.PROTO: (lambda reader: reader.number("<B"), lambda _machine, _version: None),
    pickle.FRAME: (lambda reader: reader.number("<Q"), lambda _machine, _size_bytes: None),
    pickle.BINPUT: (lambda reader: reader.number("<B"), _Machine._put),
    pickle.LONG_BINPUT: (lambda reader: reader.number("<I"), _Machine._put),
    pickle.BINGET: (lambda reader: reader.number("<B"), _Machine._get),
    pickle.LONG_BINGET: (lambda reader: reader.number("<I"), _Machine._get),
}


def _read_storage(content: bytes) -> _Storage:
    """One storage of torch's file format before zip. Raises HeaderRefused."""
    values, position = [], 0
    for _ in range(5):
        value, position = _Machine(None).run(content, position)
        values.append(value)
    magic, version, system, reference, keys = values
    if magic != LEGACY_MAGIC or version != LEGACY_VERSION:
        raise HeaderRefused("a tensor's storage is of another format")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise HeaderRefused("a tensor's storage is not little-endian")
    if not isinstance(reference, _Reference) or keys != [reference.key]:
        raise HeaderRefused("a tensor's storage is not one storage")
    num_elements = int.from_bytes(content[position : position + 8], "little", signed=True)
    elements = content[position + 8 :]
    if num_elements != reference.num_elements or len(elements) != num_elements * STORAGES[reference.dtype][1]:
        raise HeaderRefused("a tensor's storage is longer or shorter than it says")
    return _Storage(reference.dtype, elements)


def _tensor(storage: _Storage, start: int, shape: Any, strides: Any) -> Tensor:
    """A view of a storage, if it is dense. Raises HeaderRefused."""
    if not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides) or start < 0:
        raise HeaderRefused("a tensor has no sensible shape")
    stride = 1
    for extent, given in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and given != stride:
            raise HeaderRefused("a tensor is not dense")
        stride *= extent
    element_bytes = STORAGES[storage.dtype][1]
    content = storage.content[start * element_bytes : (start + stride) * element_bytes]
    if len(content) != stride * element_bytes:
        raise HeaderRefused("a tensor goes on after its storage")
    return Tensor(storage.dtype, shape, content)


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, tuple) and len(value) <= _MAX_DEPTH and all(type(item) is int and item >= 0 for item in value)
    )
