"""The processes of isolated decoders: tied to their parent, confined, one thread where they fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.clips import make_video
from tests.fakes.process_tree import children, gone, state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need memfd and pidfd")

_PARENT = """
import asyncio, sys
from preprocess import DecodeSettings, MediaKey, MediaOptions, Modality, ProcessorConfig
from preprocess.config import ImageBudget, VideoBudget
from preprocess.pool import DecodePool

async def main():
    pool = DecodePool(DecodeSettings(num_threads=2, isolation="processes"))
    await pool.warm_up()
    video = VideoBudget(4096, 65536, 10**7, fps=2.0, min_frames=4, max_frames=64, num_frames=None, use_audio=False)
    config = ProcessorConfig(image=ImageBudget(4096, 65536), video=video)
    content = sys.stdin.buffer.read()
    async def put(part):
        print("busy", flush=True)
        await asyncio.sleep(3600)
    medium = await pool.open(
        content, modality=Modality.VIDEO, options=MediaOptions(), config=config, key=MediaKey("0" * 32)
    )
    await pool.decode(medium, put, patches_per_part=1)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Another process with a pool, and a worker at work. The last test kills it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(make_video(100))
    process.stdin.close()
    assert process.stdout.readline() == b"busy\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_ctrl_c_is_the_parents_business(parent: subprocess.Popen[bytes]) -> None:
    (mother,) = children(parent.pid)
    workers = children(mother)
    for pid in (mother, *workers):
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert all(state(pid) not in ("", "Z") for pid in (mother, *workers))


def test_the_nursery_may_fork(parent: subprocess.Popen[bytes]) -> None:
    """A process with more than one thread must not: locks would stay locked in the child."""
    (mother,) = children(parent.pid)
    assert len(os.listdir(f"/proc/{mother}/task")) == 1
    threads_at_rest = [len(os.listdir(f"/proc/{worker}/task")) for worker in children(mother)]
    assert min(threads_at_rest) == 2, "main and listener"


def test_workers_are_confined(parent: subprocess.Popen[bytes]) -> None:
    (mother,) = children(parent.pid)
    for worker in children(mother):
        status = Path(f"/proc/{worker}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        limits = Path(f"/proc/{worker}/limits").read_text()
        (data,) = [line.split()[3] for line in limits.splitlines() if line.startswith("Max data size")]
        assert int(data) < 8 * 1024**3


def test_nobody_outlives_the_parent(parent: subprocess.Popen[bytes]) -> None:
    """SIGKILL gives the parent no chance to tell anyone; a worker that is stopped or stuck cannot even listen."""
    (mother,) = children(parent.pid)
    workers = children(mother)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    parent.kill()
    assert gone([mother, *workers])
