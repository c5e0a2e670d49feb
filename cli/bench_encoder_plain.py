"""Encoding as plain servers do it: one request after another, each fetched, decoded, processed and sent through the
tower by itself, with Pillow, numpy and, where that is faster, all threads for one forward. No batch, no cache.

With the tower that ours has, so that the two differ in how requests are served and in nothing else; and behind the
same kind of HTTP server, with the same request and the same reply.
"""

import asyncio
import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from cli.bench_case import Stopwatch
from cli.bench_plain import picture_patches
from cli.bench_server import Announce, Serve
from encoder.checkpoint import read_json_object
from preprocess.config import ProcessorConfig
from preprocess.types import PATCH_SIZE, TEMPORAL_PATCH_SIZE, MediaOptions

# Patches along a side of the picture that it is tried with.
_TRIED_SIDE = 24
_NUM_TRIES = 5


def plain_server(model_dir: Path, *, num_threads: int) -> Serve:
    """For `bench_server.web_process`."""
    return partial(_serve, model_dir, num_threads)


async def _serve(model_dir: Path, num_threads: int, announce: Announce, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    turn = asyncio.Lock()
    with ThreadPoolExecutor(1) as thread:
        encoder = await loop.run_in_executor(thread, partial(PlainEncoder, model_dir, num_threads=num_threads))
        async with aiohttp.ClientSession() as session:

            async def encode(request: web.Request) -> web.Response:
                (item,) = (await request.json())["input"]
                async with turn, session.get(item["image_url"]["url"]) as response:
                    content = await response.read()
                    rows = await loop.run_in_executor(thread, encoder.encode, content)
                return web.json_response(_reply(rows))

            app = web.Application()
            app.router.add_post("/v1/encode", encode)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            announce(runner.addresses[0][1])
            await stop.wait()
            await runner.cleanup()


def _reply(rows: NDArray[Any]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": 0,
                "embedding": base64.b64encode(rows.tobytes()).decode(),
                "dtype": str(rows.dtype),
                "rows": rows.shape[0],
                "width": rows.shape[1],
                "cached": False,
            }
        ],
    }


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the tower takes: patches `[h * w, 1536]`, and the grid they are of."""

    patches: NDArray[np.float32]
    height: int
    width: int


class PlainEncoder:
    """One picture at a time, all of it on the calling thread and torch's."""

    def __init__(self, model_dir: Path, *, num_threads: int) -> None:
        """Loads the tower and finds out whether its forward is faster with that many threads or with one.

        It is asked on the calling thread. Raises CheckpointError.
        """
        import torch

        from encoder import ServingTowers, load_towers

        self._towers = ServingTowers(load_towers(model_dir, torch.float32, "cpu"))
        self._config = ProcessorConfig.from_hf(read_json_object(model_dir / "config.json"))
        self.num_threads = min({1, num_threads}, key=self._forward_s)
        torch.set_num_threads(self.num_threads)

    def _forward_s(self, num_threads: int) -> float:
        import torch

        torch.set_num_threads(num_threads)
        side = _TRIED_SIDE
        prepared = Prepared(np.zeros((side * side, 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2), np.float32), side, side)
        times_s = []
        for _ in range(_NUM_TRIES):
            with Stopwatch() as watch:
                self.forward([prepared])
            times_s.append(watch.elapsed_s)
        return median(times_s)

    def encode(self, content: bytes) -> NDArray[np.float32]:
        """[rows, width]"""
        return self.forward([self.prepare(content)])[0]

    def prepare(self, content: bytes) -> Prepared:
        """Decoded, resized, cut."""
        from PIL import Image

        from preprocess.resize import smart_resize

        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
        budget = self._config.image_budget(MediaOptions())
        size = smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
        return Prepared(picture_patches(content, size), size[0] // PATCH_SIZE, size[1] // PATCH_SIZE)

    def forward(self, batch: Sequence[Prepared]) -> list[NDArray[np.float32]]:
        """Per picture [rows, width], of one pass."""
        import torch

        patches = [torch.from_numpy(prepared.patches) for prepared in batch]
        with torch.inference_mode():
            made = self._towers.rows_of_pictures(patches, [(1, each.height, each.width) for each in batch])
        # Copies: the towers use their memory again.
        return [rows.numpy().copy() for rows in made]
