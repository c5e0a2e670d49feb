"""Frame 0: what we write means the same to Python's own unpickler, and what we read cannot do anything."""

import contextlib
import enum
import itertools
import os
import pickle
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.sglang.errors import HeaderRefused
from encoder.sglang.header import Header, check_rows, read_header
from encoder.sglang.pickles import Global, Names, Tensor, write_header
from encoder.sglang.unpickle import read_attributes

MODULE = "stand_in_for_sglang"
NAMES = Names(Global(MODULE, "EmbeddingData"), Global(MODULE, "Modality"))


class EmbeddingData:
    """As the class of the reader: its constructor is never called by a pickle."""

    def __init__(self, **attributes: object) -> None:
        assert attributes, "called by a pickle"
        self.__dict__.update(attributes)


Modality = enum.Enum("Modality", "IMAGE VIDEO AUDIO")


@pytest.fixture(autouse=True)
def reader_classes() -> Iterator[None]:
    module = types.ModuleType(MODULE)
    for owned in (EmbeddingData, Modality):
        owned.__module__ = MODULE
        setattr(module, owned.__name__, owned)
    sys.modules[MODULE] = module
    yield
    del sys.modules[MODULE]


def of_torch(tensor: torch.Tensor) -> Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Tensor(dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=6), st.sampled_from(["image", "video", "audio"])
)
def test_attributes_are_what_python_reads(attributes: dict[str, Any], modality: str) -> None:
    attributes.pop("modality", None)
    frame = write_header(NAMES, modality, attributes)
    read = pickle.loads(frame)
    assert type(read) is EmbeddingData
    assert vars(read) == attributes | {"modality": Modality[modality.upper()]}
    ours = read_attributes(frame, NAMES)
    assert ours.pop("modality").name == modality  # type: ignore[attr-defined]
    assert ours == attributes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (2, 3, 4)])
def test_tensors_are_what_torch_reads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    frame = write_header(NAMES, "video", {"t": of_torch(tensor), "dtype": Global("torch", str(dtype)[6:])})
    read = pickle.loads(frame)
    assert torch.equal(read.t, tensor)
    assert read.t.dtype == read.dtype == dtype
    assert read.t.is_contiguous()
    assert read_attributes(frame, NAMES)["t"] == of_torch(tensor)


def test_counts_are_a_vector_of_int64() -> None:
    read = pickle.loads(write_header(NAMES, "audio", {"t": Tensor.of_ints((3, -1, 2**40))}))
    assert torch.equal(read.t, torch.tensor([3, -1, 2**40]))
    with pytest.raises(ValueError, match="needs 8 bytes"):
        Tensor("int64", (1,), b"1234")
    with pytest.raises(TypeError, match="set"):
        write_header(NAMES, "audio", {"t": {1}})


def test_a_header_is_small() -> None:
    attributes = {"req_id": "x" * 32, "num_parts": 1, "part_idx": 0, "grid_dim": [[1, 4, 6]], "shape": [6, 4096]}
    assert len(write_header(NAMES, "image", attributes)) < 400


def stock_header(**changes: object) -> EmbeddingData:
    attributes: dict[str, object] = {
        "req_id": "a_local_part_1",
        "num_parts": 2,
        "part_idx": 1,
        "grid_dim": torch.tensor([[1, 4, 6], [1, 2, 2]]),
        "modality": Modality.IMAGE,
        "embedding": None,
        "send_time": None,
        "dtype": torch.bfloat16,
        "shape": [7, 8],
        "_mr_ptr": None,
        "error_msg": None,
        "error_code": None,
        "unknown": [1],
    }
    return EmbeddingData(**(attributes | changes))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_headers_as_others_write_them(protocol: int) -> None:
    """By Python's own pickler, with a tensor that is a view of a larger one."""
    whole = torch.arange(12).reshape(4, 3)
    header = read_header(pickle.dumps(stock_header(grid_dim=whole[1:3]), protocol), NAMES)
    assert header.grid == ((3, 4, 5), (6, 7, 8))
    assert (header.req_id, header.num_parts, header.part_idx, header.modality) == ("a_local_part_1", 2, 1, "image")
    assert (header.shape, header.dtype) == ((7, 8), "bfloat16")
    check_rows(header, 7 * 8 * 2)
    with pytest.raises(HeaderRefused, match="112"):
        check_rows(header, 7 * 8 * 2 - 1)
    failure = EmbeddingData(req_id="a", error_msg="no", error_code=400, modality=Modality.AUDIO)
    assert read_header(pickle.dumps(failure, protocol), NAMES) == Header(
        "a", modality="audio", error_msg="no", error_code=400
    )
    sound = stock_header(
        modality=Modality.VIDEO,
        video_audio_feature_lens=torch.tensor([19]),
        video_audio_segment_lens_flat=[12, 5],
        video_audio_per_video_num_units=[0, 2],
        video_audio_embedding=torch.ones(17, 8, dtype=torch.bfloat16),
        video_timestamps=[0.0, 2.0],
    )
    header = read_header(pickle.dumps(sound, protocol), NAMES)
    assert header.audio_rows == of_torch(torch.ones(17, 8, dtype=torch.bfloat16))
    assert (header.audio_units, header.audio_lengths, header.video_timestamps) == ((0, 2), (12, 5), (0.0, 2.0))


class Gadget:
    """Runs what it is made of, when it is unpickled."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def gadgets(witness: Path) -> Iterator[bytes]:
    """Pickles that would create `witness`, or read or change what they should not."""
    touch = f"touch {witness}"
    for protocol in (0, 2, 4):
        yield pickle.dumps(Gadget(os.system, touch), protocol)
        yield pickle.dumps(stock_header(grid_dim=Gadget(os.system, touch)), protocol)
        yield pickle.dumps(Gadget(eval, f"open({str(witness)!r}, 'w')"), protocol)
        yield pickle.dumps(Gadget(getattr, os, "system") if protocol == 9 else Gadget(getattr, [], "append"), protocol)
        yield pickle.dumps(Gadget(open, str(witness), "w"), protocol)
        yield pickle.dumps(Gadget(torch.load, str(witness)), protocol)
        yield pickle.dumps(Gadget(itertools.repeat, 1), protocol)
        yield pickle.dumps(Gadget(types.SimpleNamespace), protocol)
    yield b"cos\nsystem\n(S'" + touch.encode() + b"'\ntR."
    yield b"\x80\x04cencoder.sglang.unpickle\n_Machine\n."
    # A call of the allowed class, an attribute of an allowed name, the extension registry, a persistent id.
    yield pickle.PROTO + b"\x04" + f"c{MODULE}\nEmbeddingData\n".encode() + b")R."
    yield pickle.PROTO + b"\x04" + f"c{MODULE}\nEmbeddingData.__init__\n".encode() + b"."
    yield b"\x80\x02\x82\x01."
    yield b"\x80\x02" + b"X\x01\x00\x00\x00a" + b"Q."
    # State set on the class itself, which would be that of every later message.
    yield pickle.PROTO + b"\x04" + f"c{MODULE}\nEmbeddingData\n".encode() + b"}X\x01\x00\x00\x00aK\x01sb."


def test_nothing_comes_of_gadgets(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    frames = list(gadgets(witness))
    assert len(frames) > 25
    for frame in frames:
        with pytest.raises(HeaderRefused):
            read_header(frame, NAMES)
        # Inside a tensor's storage, too.
        nested = write_header(NAMES, "image", {"req_id": "a", "t": Tensor.of_ints((1,))})
        at = nested.index(b"\x80\x02\x8a")
        size_at = at - 4
        (size,) = struct.unpack("<I", nested[size_at:at])
        smuggled = nested[:size_at] + struct.pack("<I", len(frame)) + frame + nested[at + size :]
        with pytest.raises(HeaderRefused):
            read_header(smuggled, NAMES)
    assert not witness.exists()


FOREIGN = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "getattr"),
    ("builtins", "eval"),
    ("torch", "load"),
    ("torch", "LongTensor"),
    ("torch.storage", "_load_from_byte"),
    ("collections", "OrderedDict.__init__"),
    (MODULE, "EmbeddingData.__init__"),
    (MODULE + ".x", "EmbeddingData"),
    ("encoder.sglang.unpickle", "_Machine"),
    ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"),
]


@pytest.mark.parametrize(("module", "name"), FOREIGN)
def test_a_foreign_name_is_refused_where_it_stands(module: str, name: str) -> None:
    """Before anything is made of it, in either way of naming."""
    short = [pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in (module, name)]
    for named in (f"c{module}\n{name}\n".encode(), b"".join(short) + pickle.STACK_GLOBAL):
        with pytest.raises(HeaderRefused, match="the header names"):
            read_header(b"\x80\x04" + named + b".", NAMES)


BOMBS = {
    "a memo that would take the whole memory": b"\x80\x04K\x01r\xff\xff\xff\xff.",
    "text that is announced and not there": b"\x80\x04X\xff\xff\xff\xffa.",
    "bytes that are announced and not there": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0fa.",
    "an unending program": b"\x80\x04" + b"NN\x85" * 100_000 + b".",
    "lists of lists": b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "tuples of tuples": b"\x80\x04N" + b"\x94h\x00\x86" * 10_000 + b".",
    "no end": b"\x80\x04N",
    "nothing": b"",
    "more after the end": write_header(NAMES, "image", {"req_id": "a"}) + b"N.",
}


@pytest.mark.parametrize("frame", BOMBS.values(), ids=BOMBS.keys())
def test_bombs(frame: bytes) -> None:
    with pytest.raises(HeaderRefused):
        read_header(frame, NAMES)


def test_large_headers_are_refused_unread() -> None:
    frame = write_header(NAMES, "image", {"req_id": "a" * 5000})
    assert read_header(frame, NAMES).req_id == "a" * 5000
    with pytest.raises(HeaderRefused, match="allowed are 4000"):
        read_header(frame, NAMES, max_bytes=4000)


WRONG: list[dict[str, object]] = [
    {"req_id": None},
    {"shape": [1, 2, 3]},
    {"shape": [True, 2]},
    {"shape": [-1, 2]},
    {"num_parts": True},
    {"part_idx": 1.0},
    {"error_msg": 5},
    {"error_code": "400"},
    {"grid_dim": 5},
    {"grid_dim": [[1.5]]},
    {"grid_dim": torch.ones(2)},
    {"video_timestamps": ["now"]},
    {"grid_dim": torch.arange(6).reshape(2, 3).t()},
    {"grid_dim": torch.arange(3).expand(2, 3)},
]


@pytest.mark.parametrize("change", WRONG)
def test_headers_that_contradict_their_types(change: dict[str, object]) -> None:
    with pytest.raises(HeaderRefused):
        read_header(pickle.dumps(stock_header(**change), 4), NAMES)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damaged_headers_are_refused_or_read(data: st.DataObject) -> None:
    """Nothing but HeaderRefused ever comes out."""
    frame = bytearray(
        pickle.dumps(stock_header(), 4)
        if data.draw(st.booleans())
        else write_header(NAMES, "video", {"req_id": "a", "video_audio_embedding": Tensor.of_ints((1, 2))})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(HeaderRefused):
        read_header(bytes(frame), NAMES)


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes(frame: bytes) -> None:
    with pytest.raises(HeaderRefused):
        read_header(b"\x80\x04" + frame, NAMES)
