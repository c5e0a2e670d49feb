"""`mimo encode`: names of any bytes, warnings where users look for them, and what an interruption keeps."""

import json
import os
import signal
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import xxhash
from safetensors import safe_open
from typer.testing import CliRunner

from cli.app import app
from cli.load import ConfigError
from encoder import LocalRows
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality
from tests.fakes.media_parts import damaged_clip

PICTURE = Path(__file__).parent.parent.parent / "samples" / "picture.png"


def encode(*arguments: Path | str) -> Any:
    return CliRunner().invoke(app, ["encode", *map(str, arguments)])


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Metadata of each tensor, in the order of the file's metadata; every tensor has some."""
    with safe_open(str(path), framework="numpy") as file:
        assert set(file.metadata()) == set(file.keys())
        return {name: json.loads(entry) for name, entry in file.metadata().items()}


def test_names_of_any_bytes_and_warnings(tmp_path: Path) -> None:
    odd, escaped = tmp_path / os.fsdecode(b"odd \xff[b].png"), f"{tmp_path}/odd \\xff[b].png"
    odd.write_bytes(PICTURE.read_bytes())
    fine, hurt = tmp_path / "bilder-ä.png", tmp_path / "hurt.mp4"
    fine.write_bytes(PICTURE.read_bytes())
    hurt.write_bytes(damaged_clip())
    bad, bad_name = tmp_path / os.fsdecode(b"bad\xfe\x1b.png"), f"{tmp_path}/bad\\xfe\x1b.png"
    bad.write_bytes(b"this is no picture")
    out = tmp_path / os.fsdecode(b"out\xff.safetensors")
    done = encode(tmp_path, "--json", "--out", out)
    assert done.exit_code == 1, done.output
    found = read(out)
    assert set(found) == {escaped, str(fine), str(hurt)}
    assert found[escaped]["warnings"] == found[str(fine)]["warnings"] == []
    (warning,) = found[str(hurt)]["warnings"]
    *lines_of_files, last = map(json.loads, done.stdout.splitlines())
    assert last["summary"]["done"] == 3
    lines = {entry["file"]: entry for entry in lines_of_files}
    assert set(lines) == {*found, bad_name}
    assert lines[str(hurt)]["warnings"] == [warning]
    assert lines[escaped]["out"] == f"{tmp_path}/out\\xff.safetensors"
    told = done.stderr.splitlines()
    assert told[0].startswith("3 of 4 files")
    assert told[0].endswith(f"written to {tmp_path}/out\\xff.safetensors")
    assert told[1] == f"warning {hurt}: {warning}"
    assert told[2].startswith(f"failed {tmp_path}/bad\\xfe\\x1b.png: ")
    assert len(told) == 3


def test_two_names_that_would_be_one_are_refused(tmp_path: Path) -> None:
    for name in (b"a\xff.png", b"a\\xff.png"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"x")
    refused = encode(tmp_path).exception
    assert isinstance(refused, ConfigError)
    assert "2 files would be named" in str(refused)


class Interrupted:
    """An encoder that never ends one of its files, and whose user loses patience when it is given the third."""

    began: list[bytes]
    stuck = b""

    def __init__(self, *_: object, **__: object) -> None:
        self._closed = threading.Event()
        self._ordering = threading.Lock()

    dtype = "float32"
    width = 4

    def key(self, content: bytes, modality: Modality, options: MediaOptions) -> MediaKey:
        return MediaKey(content.hex())

    def settings(self, modality: Modality, options: MediaOptions) -> str:
        return "settings"

    def encode_key(self, key: MediaKey, content: bytes, modality: Modality, options: MediaOptions) -> LocalRows:
        with self._ordering:
            self.began.append(content)
            if len(self.began) == 3:
                # Its thread is done with another file.
                os.kill(os.getpid(), signal.SIGINT)
            elif content != self.stuck:
                rows = memoryview(bytes(2 * 4 * 4))
                return LocalRows(MediaLayout(modality, grid_thw=(1, 2, 4)), rows, xxhash.xxh3_64_intdigest(rows), ())
        self._closed.wait()
        raise CancelledError

    def close(self) -> None:
        self._closed.set()


@pytest.mark.parametrize("stuck", [b"0", b"1"])
def test_an_interruption_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bytes) -> None:
    """Also what was done before a file that comes first."""
    monkeypatch.setattr("encoder.LocalEncoder", Interrupted)
    monkeypatch.setattr(Interrupted, "began", [], raising=False)
    monkeypatch.setattr(Interrupted, "stuck", stuck)
    for i in range(9):
        (tmp_path / f"{i}.png").write_bytes(b"%d" % i)
    out = tmp_path / "out.safetensors"
    done = encode(tmp_path, "--out", out, "--concurrency", "2")
    assert done.exit_code == 130
    (line,) = done.stderr.splitlines()
    # Which of the two threads begins first is theirs to say, and the signal comes a little before or after a result.
    began = Interrupted.began
    whole = [str(tmp_path / f"{content.decode()}.png") for content in began if content not in (stuck, began[2])]
    kept = list(read(out))
    assert kept
    assert set(kept) <= set(whole)
    assert line.startswith(f"interrupted: {len(kept)} of 9 files, {2 * len(kept)} rows in ")
    assert line.endswith(f"written to {out}")
    assert len(began) < 9
    assert not list(tmp_path.glob(".*"))


def test_an_interruption_before_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("encoder.LocalEncoder", interrupted)
    out = tmp_path / "out.safetensors"
    done = encode(PICTURE, "--out", out)
    assert done.exit_code == 130
    assert done.stderr.startswith("interrupted: 0 of 1 files, 0 rows in ")
    assert done.stderr.endswith("nothing written\n")
    assert not out.exists()
