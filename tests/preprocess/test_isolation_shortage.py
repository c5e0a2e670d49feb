"""Results hold no descriptors, and want of descriptors on our side is not a fault of any file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.clips import blocks, picture_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need memfd and pidfd")

_MANY = """
import asyncio, os, resource, signal, sys
from pathlib import Path
from preprocess import DecoderUnavailable, DecodeSettings, FetchLimits, MediaKey, MediaOptions, Modality
from preprocess import ProcessorConfig
from preprocess.local import read_file_url
from preprocess.pool import DecodePool

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    pool = DecodePool(DecodeSettings(num_threads=1, isolation="processes"))
    await pool.warm_up()
    content, config = sys.stdin.buffer.read(), ProcessorConfig.from_hf({"processor_config": {}})

    async def prepare():
        return await pool.prepare(
            content, modality=Modality.IMAGE, options=MediaOptions(), config=config, key=MediaKey("0" * 32)
        )

    kept = [await prepare() for _ in range(150)]
    assert all((one.patches.pixel_values == kept[0].patches.pixel_values).all() for one in kept)
    assert len(os.listdir("/proc/self/fd")) < 24
    print("kept", flush=True)
    held = []

    def fill():
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass

    fill()
    limits = FetchLimits(media_roots=(Path("/"),))
    # With none left nothing is sent; with one or two left the content is, and the result cannot come.
    for free in range(3):
        for _ in range(2):
            try:
                await prepare()
            except DecoderUnavailable as error:
                assert error.status == 503 and "short of open files" in error.message, error.message
            else:
                assert free, "nothing can be sent"
        if not free:
            try:
                read_file_url("file:///etc/passwd", limits)
                raise AssertionError("no descriptor is left")
            except DecoderUnavailable:
                pass
        os.close(held.pop())
    while held:
        os.close(held.pop())
    # No buffer is left to be used again.
    kept += [await prepare() for _ in range(8)]

    # None left only when the result comes.
    mother = pool._nursery._process.pid
    (worker,) = map(int, Path(f"/proc/{mother}/task/{mother}/children").read_text().split())
    await asyncio.sleep(0.3)
    os.kill(worker, signal.SIGSTOP)
    call = asyncio.create_task(prepare())
    await asyncio.sleep(0.5)
    fill()
    os.kill(worker, signal.SIGCONT)
    try:
        await call
        raise AssertionError("the result had no room")
    except DecoderUnavailable as error:
        assert "short of open files" in error.message, error.message
    # Nor can another worker be started.
    try:
        await prepare()
        raise AssertionError("there was no room for a worker")
    except DecoderUnavailable as error:
        assert "short of open files" in error.message, error.message
    while held:
        os.close(held.pop())
    await prepare()
    counters = pool.counters
    assert counters == {"nurseries": 1, "forked": 2, "abandoned": 1}, counters
    print("recovered", flush=True)
    pool.close()

asyncio.run(main())
"""


def test_many_results_live_with_few_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MANY],
        cwd=Path(__file__).parents[2],
        input=picture_file(blocks(40, 40, 0)),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, [b"kept", b"recovered"]), done.stderr.decode()[-3000:]
