"""`mimo encode` as a process: killed, interrupted, run again, and how much memory it takes for many inputs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from tests.fakes.instant_encoder import InstantEncoder

ROOT = Path(__file__).parent.parent.parent
NUM_MEDIA = 80
KINDS = {
    "packed": ["--out", "out/all.safetensors"],
    "tree": ["--out-dir", "out"],
    "shards": ["--out-dir", "out", "--shard-rows", "50"],
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("media").mkdir()
    for i in range(NUM_MEDIA):
        # Every tenth is the same.
        Path(f"media/{i:02}.png").write_bytes(b"same" if i % 10 == 5 else b"%d" % i * (1 + i % 9))


def start(kind: str, *arguments: str, delay_ms: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fakes.instant_encoder", str(delay_ms), "encode", "media", *KINDS[kind]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "--json", *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def num_kept() -> int:
    """Inputs whose rows are on the disk somewhere."""
    found = sum(not path.name.startswith("shard") for path in Path("out").rglob("*.safetensors"))
    return found + 8 * len(list(Path("out").glob("shard-*")))


def stop_at(process: subprocess.Popen[str], num: int, number: signal.Signals) -> None:
    until_s = time.monotonic() + 60
    while num_kept() < num and process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.002)
    assert process.poll() is None
    process.send_signal(number)


def end(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The summary, and what was told."""
    output, told = process.communicate(timeout=60)
    lines = output.splitlines()
    return (json.loads(lines[-1])["summary"] if lines else {}), told


def snapshot() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path("out").rglob("*")) if path.is_file()}


@pytest.fixture
def uninterrupted(kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, bytes]]:
    """What the command writes at one go."""

    def run() -> dict[str, bytes]:
        with monkeypatch.context() as patched:
            patched.setattr("encoder.LocalEncoder", InstantEncoder)
            Path("out").rename("kept")
            Path("out").mkdir()
            assert CliRunner().invoke(app, ["encode", "media", *KINDS[kind]]).exit_code == 0
            made = snapshot()
            Path("out").rename("fresh")
            Path("kept").rename("out")
        return made

    return run


def test_killed_again_and_again_it_ends_as_if_it_had_not(
    kind: str, uninterrupted: Callable[[], dict[str, bytes]]
) -> None:
    for num in (5, 40):
        with start(kind, delay_ms=15) as process:
            stop_at(process, num, signal.SIGKILL)
    # What a killed writer leaves behind is no obstacle.
    # Inputs that went into a shard while they were counted were counted twice.
    assert num_kept() >= 32
    with start(kind) as process:
        summary, _ = end(process)
    assert process.returncode == 0
    assert summary["done"] == NUM_MEDIA
    assert summary["encoded"] <= NUM_MEDIA - 30
    assert snapshot() == uninterrupted()


def test_an_interruption_loses_nothing_of_an_earlier_run(
    kind: str, uninterrupted: Callable[[], dict[str, bytes]]
) -> None:
    with start(kind) as process:
        end(process)
    before = snapshot()
    for i in range(40):
        Path(f"media/0-{i:02}.png").write_bytes(b"new %d" % i)
    num = num_kept()
    with start(kind, delay_ms=20) as process:
        # One of the two ways for each kind of output.
        number, code = (signal.SIGTERM, 143) if kind == "tree" else (signal.SIGINT, 130)
        stop_at(process, num + 4, number)
        # As `timeout` does, which tells the process and then its group.
        process.send_signal(number)
        summary, told = end(process)
    assert process.returncode == code, told
    assert "interrupted: " in told
    assert "Traceback" not in told
    if kind == "packed":
        assert snapshot()["out/all.safetensors"] == before["out/all.safetensors"]
        assert re.search(r"\d+ contents are kept for the next run", told)
        assert re.search(r"interrupted: [1-9]\d* of 120 files", told)
    with start(kind) as process:
        summary, _ = end(process)
    assert (process.returncode, summary["done"]) == (0, NUM_MEDIA + 40)
    assert summary["encoded"] <= 36
    assert snapshot() == uninterrupted()


def test_memory_does_not_grow_with_the_inputs(kind: str) -> None:
    """A megabyte of rows each."""
    for i in range(NUM_MEDIA):
        Path(f"media/{i:02}.png").write_bytes(b"big %d" % i)
    limits = [] if kind != "shards" else ["--shard-bytes", str(20 * 2**20)]
    with start(kind, "--concurrency", "4", *limits) as process:
        summary, told = end(process)
    assert summary["encoded"] == NUM_MEDIA
    grown = re.search(r"grown by (\d+) bytes", told)
    assert grown is not None
    assert int(grown[1]) < 24 * 2**20
