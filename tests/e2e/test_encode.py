"""`mimo encode` writes, bit for bit, what the encoder server returns for the same files."""

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from safetensors import safe_open

from cli.load import BUILTIN_MODELS
from cli.stage import EncoderStage, write_settings
from encoder.client import ArenaReader, EncoderClient
from encoder.config import EncoderConfig
from preprocess.config import ProcessorConfig
from preprocess.keys import media_key
from preprocess.types import MediaOptions, Modality
from tests.e2e.service import ROOT, SAMPLES

pytestmark = pytest.mark.e2e

MODEL_DIR = BUILTIN_MODELS["mimo-nano"]


def mimo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user has one: pictures of several kinds and sizes, a clip, a sound, and something else."""
    directory: Path = tmp_path_factory.mktemp("media")
    for i, (width, height) in enumerate([(96, 96), (300, 40), (33, 257), (640, 480), (5, 3)]):
        picture = Image.new("RGB", (width, height), (40 * i, 255 - 30 * i, 90))
        ImageDraw.Draw(picture).ellipse((1, 1, width - 1, height - 1), fill=(200, 20 * i, 10))
        picture.save(directory / f"picture {i}.{'png' if i % 2 else 'jpg'}")
    (directory / "nested").mkdir()
    for name in ("clip.mp4", "tones.wav", "picture.png"):
        (directory / "nested" / name).write_bytes((SAMPLES / name).read_bytes())
    (directory / "notes.txt").write_text("not a medium")
    return directory


@pytest.fixture(scope="module")
def encoded(media_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "media.safetensors"
    done = mimo("encode", str(media_dir), "--out", str(out), cwd=media_dir)
    assert done.returncode == 0, done.stderr
    assert "8 of 8 files" in done.stderr
    return out


def read(path: Path) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    with safe_open(str(path), framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


async def ask_server(
    address: str, files: dict[str, tuple[Modality, bytes]], options: MediaOptions
) -> dict[str, tuple[str, NDArray[np.float32]]]:
    """All files at once, so that the server batches as it likes."""
    processor = ProcessorConfig.from_hf(json.loads((MODEL_DIR / "config.json").read_text()))
    async with EncoderClient.connect([address]) as client:
        info = await client.info()
        reader = ArenaReader()

        async def one(modality: Modality, content: bytes) -> tuple[str, NDArray[np.float32]]:
            applying = options.applying_to(modality)
            key = media_key(
                content,
                modality=modality,
                options=applying,
                processor=processor,
                tower_fingerprint=info.fingerprint,
            )
            reply = await client.encode(content, modality, applying, key, time.time() + 120)
            rows = reader.array(reply.ref).copy()
            client.release(reply.ref)
            return reply.key, rows

        answers = await asyncio.gather(*(one(modality, content) for modality, content in files.values()))
    return dict(zip(files, answers, strict=True))


OPTIONS = MediaOptions(fps=3.0, max_frames=6, min_frames=3, min_pixels=9000, max_pixels=20_000, detail="low")
FLAGS = ["--fps", "3", "--max-frames", "6", "--min-frames", "3", "--min-pixels", "9000", "--max-pixels", "20000"]
FLAGS += ["--detail", "low"]


def test_file_equals_server(encoded: Path, media_dir: Path, tmp_path: Path) -> None:
    with_options = tmp_path / "options.safetensors"
    done = mimo("encode", str(media_dir), "--out", str(with_options), *FLAGS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stage = EncoderStage(
        config=EncoderConfig(),
        model_dir=MODEL_DIR,
        name="encoder-0",
        address=f"ipc://{tmp_path}/encoder-0",
        arena=f"mimo-test-{os.getpid()}",
    )
    write_settings(stage, tmp_path / "encoder.json")
    command = [sys.executable, "-m", "cli.stage", "encoder", "--name", stage.name, "--parent", str(os.getpid())]
    keys = []
    with subprocess.Popen([*command, "--settings", str(tmp_path / "encoder.json")], cwd=ROOT) as process:
        try:
            for path, options in ((encoded, MediaOptions()), (with_options, OPTIONS)):
                tensors, metadata = read(path)
                entries = {name: json.loads(metadata[name]) for name in tensors}
                files = {
                    name: (Modality(entry["modality"]), Path(name).read_bytes()) for name, entry in entries.items()
                }
                served = asyncio.run(ask_server(stage.address, files, options))
                assert len(tensors) == 8
                for name, rows in tensors.items():
                    key, expected = served[name]
                    assert entries[name]["key"] == key
                    assert rows.tobytes() == expected.tobytes(), name
                keys.append({name: entry["key"] for name, entry in entries.items()})
        finally:
            process.terminate()
    assert process.returncode == 0
    # The options say nothing of a sound, and something of every picture and clip.
    same = {Path(name).name for name in keys[0] if keys[0][name] == keys[1][name]}
    assert same == {"tones.wav"}


def test_metadata_describes_each_tensor(encoded: Path) -> None:
    tensors, metadata = read(encoded)
    for name, rows in tensors.items():
        entry = json.loads(metadata[name])
        assert entry["model"] == "mimo-nano"
        assert [entry["rows"], entry["width"]] == list(rows.shape)
        if entry["modality"] != "audio":
            t, h, w = entry["grid_thw"]
            assert entry["rows"] == t * h * w // 4 + entry["num_audio_rows"]
        if entry["modality"] == "video":
            assert len(entry["timestamps_s"]) == t
    keys = [json.loads(metadata[name])["key"] for name in tensors]
    assert len(set(keys)) == len(keys)


def test_the_same_bytes_under_two_names_are_one_medium(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes((SAMPLES / "picture.png").read_bytes())
    done = mimo("encode", "one.png", "two.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tensors, metadata = read(tmp_path / "embeddings.safetensors")
    first, second = sorted(tensors)
    assert json.loads(metadata[first])["key"] == json.loads(metadata[second])["key"]
    assert tensors[first].tobytes() == tensors[second].tobytes()


def test_one_bad_file_costs_only_itself(media_dir: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"this is not a picture")
    good = tmp_path / "good.png"
    buffer = io.BytesIO()
    Image.new("RGB", (96, 96), "blue").save(buffer, "PNG")
    good.write_bytes(buffer.getvalue())
    done = mimo("encode", str(bad), str(good), "--json", cwd=tmp_path)
    assert done.returncode == 1
    *lines, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert (summary["summary"]["done"], summary["summary"]["failed"]) == (1, 1)
    assert {Path(line["file"]).name: "error" in line for line in lines} == {"good.png": False, "bad.png": True}
    assert all(("code" in line) == ("error" in line) for line in lines)
    out = tmp_path / "embeddings.safetensors"
    tensors, _ = read(out)
    assert list(tensors) == [str(good)]
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask


def test_results_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    """Whatever is ready first: a clip takes longer than the picture and the sound after it."""
    names = ["clip.mp4", "picture.png", "tones.wav", "again.png"]
    for name in names:
        (tmp_path / name).write_bytes((SAMPLES / name.replace("again", "picture")).read_bytes())
    done = mimo("encode", *names, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["file"] for line in done.stdout.splitlines()[:-1]] == names


def test_an_interrupted_run_keeps_what_is_done(tmp_path: Path) -> None:
    """On a terminal, where progress shows when to interrupt."""
    for i in range(200):
        # What comes after a picture's end is not looked at, but makes another content of it.
        (tmp_path / f"{i:03}.png").write_bytes((SAMPLES / "picture.png").read_bytes() + bytes([i]))
    ours, theirs = pty.openpty()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "cli", "encode", str(tmp_path), "--out", "out.safetensors"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=theirs) as process:
        os.close(theirs)
        told = b""
        while chunk := read_some(ours):
            told += chunk
            if process.poll() is None and re.search(rb"[1-9]\d*/200", told):
                process.send_signal(signal.SIGINT)
                break
        while chunk := read_some(ours):
            told += chunk
    os.close(ours)
    assert process.returncode == 130, told
    assert b"Traceback" not in told
    found = re.search(rb"interrupted: (\d+) of 200 files", told)
    assert found is not None, told
    tensors, metadata = read(tmp_path / "out.safetensors")
    assert set(tensors) == set(metadata)
    assert 1 <= len(tensors) == int(found[1]) < 200


def test_a_killed_run_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for i in range(60):
        picture = Image.new("RGB", (320 - i, 200 + i), (4 * i, 90, 30))
        ImageDraw.Draw(picture).ellipse((i, i, 150, 150), fill=(200, i, 10))
        picture.save(tmp_path / "media" / f"{i:02}.jpg")
    (tmp_path / "media" / "again.jpg").write_bytes((tmp_path / "media" / "00.jpg").read_bytes())
    command = ["encode", "media", "--shard-rows", "900", "--out-dir"]
    whole = mimo(*command, "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "cli", *command, "killed"], cwd=tmp_path, env=environment) as process:
        while not (tmp_path / "killed" / "shard-00001.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
    assert not (tmp_path / "killed" / "index.jsonl").exists()
    rest = mimo(*command, "killed", "--json", cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    summary = json.loads(rest.stdout.splitlines()[-1])["summary"]
    assert (summary["done"], summary["encoded"] + summary["done_before"] + summary["duplicates"]) == (61, 61)
    assert 0 < summary["encoded"] < 50
    made, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("killed", "whole")
    )
    assert len(expected) > 4
    assert made == expected


def read_some(terminal: int) -> bytes:
    """Nothing once the other end is closed, which a terminal calls an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_nothing_is_written_when_nothing_could_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"this is not a picture")
    done = mimo("encode", "bad.png", "bad.png", cwd=tmp_path)
    assert done.returncode == 1
    assert "0 of 1 files" in done.stderr
    assert list(tmp_path.glob("*.safetensors*")) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["missing.png"], "missing.png"),
        (["."], "no image, video or audio"),
        (["x.png", "--model", "nothing"], "nothing"),
        (["x.png", "--out", "no/such/dir/x.safetensors"], "no/such/dir"),
        (["x.png", "--fps", "-1"], "fps is -1.0, allowed is 0.001 to 240"),
        (["x.png", "--fps", "nan"], "fps is nan"),
        (["x.png", "--fps", "1"], "--fps is an option for video files"),
        (["x.png", "--modality", "audio", "--detail", "low"], "--detail is an option for image files"),
        (["x.png", "--detail", "ultra"], "ultra"),
        (["x.png", "--min-pixels", "9", "--max-pixels", "8"], "max_pixels is 8"),
        (["x.png", "--detail", "low", "--max-pixels", "300000"], "detail is low"),
        (["x.png", "--threads", "0"], "threads"),
        (["x.png", "--out", "x.png"], "one of the inputs"),
        (["x.png", "--out", "."], "not a regular file"),
        (["x.png", "--out", "/dev/null"], "not a regular file"),
    ],
)
def test_wrong_usage_is_told_with_exit_code_2(tmp_path: Path, arguments: list[str], word: str) -> None:
    if "x.png" in arguments:
        (tmp_path / "x.png").write_bytes(b"x")
    done = mimo("encode", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
