"""Opening a checkpoint's small files: whatever lies there instead is named, in one line."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from encoder.checkpoint import CheckpointError, file_size, read_header, read_json_object, read_text
from encoder.files import MAX_TEXT_BYTES


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)


ODDITIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "is missing"),
    "directory": (lambda path: path.mkdir(), "is a directory, expected a file"),
    "pipe": (fifo, "is a pipe, expected a file"),
    "socket": (listening, "is a socket, expected a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
    "loop": (lambda path: path.symlink_to(path), "is a symbolic link that leads to itself"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "is a link to a file that is missing"),
    "huge": (huge, "a file of this kind has at most"),
    "empty": (lambda path: path.touch(), "is not JSON"),
    "bytes": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "is not UTF-8 text"),
    "deep": (lambda path: path.write_text("[" * 100_000), "is nested too deeply"),
    "deep object": (lambda path: path.write_text('{"a":' * 100_000), "is nested too deeply"),
    "long number": (lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"), "is not JSON"),
    "list": (lambda path: path.write_text("[]"), "holds no JSON object"),
    "null": (lambda path: path.write_text("null"), "holds no JSON object"),
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_what_is_no_configuration_is_named(tmp_path: Path, oddity: str) -> None:
    make, words = ODDITIES[oddity]
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(CheckpointError) as refused:
        read_json_object(path)
    assert str(refused.value).startswith(f"{path} ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_long_name_and_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has a name too long for a file"):
        file_size(tmp_path / ("x" * 5000))
    (tmp_path / "model").touch()
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        read_text(tmp_path / "model" / "config.json")
    with pytest.raises(CheckpointError, match="is no file name"):
        file_size(tmp_path / "a\0b")


def test_permission_denied_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(8))
    monkeypatch.setattr(os, "open", denied)
    for read in (read_json_object, read_text):
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read: permission denied"):
            read(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read: permission denied"):
        read_header(tmp_path / "a.safetensors")


def test_a_byte_order_mark_is_not_content(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert read_json_object(path) == {"a": "é"}


def test_names_in_messages_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\nb"
    with pytest.raises(CheckpointError) as refused:
        read_json_object(path)
    assert str(refused.value).isprintable()
