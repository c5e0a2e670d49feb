"""Files that are not what they should be: each fault is one error that names file and tensor; and reading ranges."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from encoder.checkpoint import (
    INDEX_FILE,
    CheckpointError,
    TensorReader,
    find_tensors,
    read_header,
    scan_tensors,
    shown,
)

NAME = "model.safetensors"


def everything(name: str) -> bool:
    return True


def save(path: Path, *names: str) -> None:
    save_file({name: torch.arange(4.0) + i for i, name in enumerate(names)}, path)


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def raw(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_headers_and_ranges_are_those_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b": torch.arange(6).to(torch.float8_e4m3fn).view(2, 3),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "number": torch.tensor(7.0),
    }
    save_file(tensors, tmp_path / NAME, metadata={"format": "pt"})
    found = find_tensors(tmp_path, everything)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        "a": ("F32", (3, 4)),
        "b": ("F8_E4M3", (2, 3)),
        "empty": ("BF16", (0, 5)),
        "number": ("F32", ()),
    }
    with TensorReader() as reader:
        for name, tensor in tensors.items():
            stored = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            for start in (0, len(stored) // 2):
                buffer = bytearray(len(stored) - start)
                reader.read_into(found[name], memoryview(buffer), start_byte=start)
                assert bytes(buffer) == stored[start:]
        with pytest.raises(ValueError, match="a has 48 bytes"):
            reader.read_into(found["a"], memoryview(bytearray(8)), start_byte=44)


def test_without_an_index_every_file_counts(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "x")
    save(tmp_path / "b.safetensors", "y", "z")
    assert sorted(find_tensors(tmp_path, everything)) == ["x", "y", "z"]
    assert sorted(find_tensors(tmp_path, lambda name: name == "y")) == ["y"]
    save(tmp_path / "c.safetensors", "y")
    with pytest.raises(CheckpointError, match=r"y is in b\.safetensors and in c\.safetensors"):
        find_tensors(tmp_path, everything)
    assert sorted(find_tensors(tmp_path, lambda name: name == "x")) == ["x"]


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        find_tensors(tmp_path, everything)


def test_all_faults_of_an_index_are_named_at_once(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "x", "twice")
    save(tmp_path / "b.safetensors", "y", "twice")
    (tmp_path / "c.safetensors").write_bytes(b"no weights")
    files = {"x": "a", "gone": "a", "twice": "a", "y": "b", "v": "c", "w": "d", "u": "d"}
    index(tmp_path, {name: f"{file}.safetensors" for name, file in files.items()})
    with pytest.raises(CheckpointError) as raised:
        find_tensors(tmp_path, everything)
    assert str(raised.value).splitlines()[1:] == [
        "c.safetensors is not a safetensors file (10 bytes)",
        f"d.safetensors is missing: {INDEX_FILE} says it holds u, w",
        "twice is in a.safetensors and in b.safetensors",
        f"a.safetensors lacks gone, which {INDEX_FILE} says it holds",
    ]
    # Files with nothing wanted are never looked at.
    assert list(find_tensors(tmp_path, lambda name: name == "y")) == ["y"]


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "a\\b", "a\0b"]
)
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, file: str) -> None:
    save(tmp_path / "secret.safetensors", "x")
    (tmp_path / "model").mkdir()
    index(tmp_path / "model", {"x": file})
    with pytest.raises(CheckpointError, match=r"puts x into .*, which is not a file name"):
        find_tensors(tmp_path / "model", everything)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["x"]}', '{"weight_map": {"x": 3}}'])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    save(tmp_path / NAME, "x")
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        find_tensors(tmp_path, everything)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry(0, 4)}, b"abc", "cut short: x ends at byte"),
        ({"x": entry(0, 4)}, b"abcde", "1 bytes after its last tensor"),
        ({"x": entry(0, 2), "y": entry(3, 5)}, b"abcde", "y at byte"),
        ({"x": entry(0, 3), "y": entry(2, 5)}, b"abcde", "y at byte"),
        ({"x": entry(1, 4)}, b"abcd", "x at byte"),
        ({"x": entry(0, 4, "F32", [2])}, b"abcd", r"gives x 4 bytes for F32 \[2\]"),
        ({"x": entry(0, 4, shape=[-4])}, b"abcd", "describes x with"),
        ({"x": {"dtype": "U8", "shape": [4]}}, b"abcd", "describes x with"),
        ({"x": [4]}, b"abcd", "describes x with"),
        ([], b"", "it is not an object"),
        (b"{", b"", "has no readable header"),
        (b'{"x": 1, "x": 2}', b"", "names x twice"),
        (b"\xff\xfe", b"", "has no readable header"),
    ],
)
def test_damaged_files(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        read_header(raw(tmp_path / NAME, header, data))


def test_a_file_cut_inside_its_header(tmp_path: Path) -> None:
    save(tmp_path / NAME, "x")
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short: its header"):
        find_tensors(tmp_path, everything)


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    save(tmp_path / NAME, "x")
    found = find_tensors(tmp_path, everything)["x"]
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-4])
    with TensorReader() as reader, pytest.raises(CheckpointError, match=r"model\.safetensors ended inside x"):
        reader.read_into(found, memoryview(bytearray(16)))


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=80), length=st.integers(0, 90))
def test_any_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int) -> None:
    path = tmp_path_factory.mktemp("any") / NAME
    path.write_bytes(length.to_bytes(8, "little") + content)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert sum(tensor.size_bytes for tensor in tensors.values()) == len(content) - length


def test_a_scan_reads_as_much_as_can_be_read(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "x", "twice", "extra")
    save(tmp_path / "b.safetensors", "y", "twice", "elsewhere")
    (tmp_path / "c.safetensors").write_bytes(b"no weights")
    files = {"x": "a", "gone": "a", "twice": "a", "elsewhere": "a", "y": "b", "v": "c", "w": "d"}
    index(tmp_path, {name: f"{file}.safetensors" for name, file in files.items()})
    scan = scan_tensors(tmp_path, everything)
    assert sorted(scan.tensors) == ["elsewhere", "extra", "twice", "x", "y"]
    assert scan.unread == {"v", "w"}
    assert scan.absent == {"a.safetensors": ["gone"]}
    assert scan.knows_all
    assert [fault.split()[0] for fault in scan.faults] == ["c.safetensors", "d.safetensors"]
    assert scan.conflicts == [
        "twice is in a.safetensors and in b.safetensors",
        f"{INDEX_FILE} puts tensors into files that do not hold them, though others do: elsewhere",
    ]
    (tmp_path / INDEX_FILE).unlink()
    assert not scan_tensors(tmp_path, everything).knows_all


@pytest.mark.parametrize("metadata", [[1, 2], "pt", {"format": 1}, None, 3])
def test_metadata_is_text_by_name(tmp_path: Path, metadata: object) -> None:
    header = {"__metadata__": metadata, "x": entry(0, 4)}
    with pytest.raises(CheckpointError, match=r"as __metadata__, allowed is an object of text"):
        read_header(raw(tmp_path / NAME, header, b"abcd"))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[" * 200_000, "nested too deeply"),
        ({"x": entry(0, 4, shape=[2**70])}, "describes x"),
        ({"x": entry(0, 4, shape=[True, 4])}, "describes x"),
        ({"x": entry(0, 4, shape=[1] * 1000)}, "describes x"),
    ],
)
def test_headers_that_would_cost_dearly(tmp_path: Path, header: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        read_header(raw(tmp_path / NAME, header, b"abcd"))
    assert len(str(refused.value)) < 400


def test_an_index_with_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    index(tmp_path, {"x": "a" * 5000})
    with pytest.raises(CheckpointError, match=r"puts x into 'aaa.*not a file name") as refused:
        find_tensors(tmp_path, everything)
    assert len(str(refused.value)) < 400


def test_names_are_counted_not_listed_and_do_nothing_to_a_terminal() -> None:
    assert shown(f"t{i}" for i in range(1021)).endswith("t19 and 1,001 more")
    assert shown(["evil\x1b[31m\nred"]) == "evil\\x1b[31m\\nred"
