"""Which files a command line names, and as what."""

import base64
import os
from pathlib import Path

import pytest

from cli.media_files import MediaFileError, chat_part, expand_paths, path_text
from preprocess.types import Modality


def test_a_directory_becomes_its_media_files_in_order(tmp_path: Path) -> None:
    for name in ("b.MP4", "a.png", "notes.txt", "sub/c.wav"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    found = [(path.name, modality) for path, modality in expand_paths([tmp_path])]
    assert found == [("a.png", Modality.IMAGE), ("b.MP4", Modality.VIDEO), ("c.wav", Modality.AUDIO)]


@pytest.mark.parametrize("name", ["missing.png", "notes.txt", "empty"])
def test_unusable_paths_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MediaFileError, match=name):
        expand_paths([tmp_path / name])


@pytest.mark.parametrize(
    ("name", "text"), [(b"a.png", "a.png"), ("ä 中.png".encode(), "ä 中.png"), (b"b\xff\xc3.jpg", "b\\xff\\xc3.jpg")]
)
def test_a_name_of_any_bytes_is_text(tmp_path: Path, name: bytes, text: str) -> None:
    path = tmp_path / os.fsdecode(name)
    assert path_text(path) == f"{tmp_path}/{text}"
    with pytest.raises(MediaFileError) as missing:
        expand_paths([path])
    assert str(missing.value) == f"{tmp_path}/{text}: no such file"


def test_chat_part_carries_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.webm"
    path.write_bytes(b"\x00\xff")
    part = chat_part(path, Modality.VIDEO)
    head, _, payload = part["video_url"]["url"].partition(",")
    assert (part["type"], head) == ("video_url", "data:video/webm;base64")
    assert base64.b64decode(payload) == b"\x00\xff"
