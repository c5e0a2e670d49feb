"""Encoding as plain servers do it: one request after another, each fetched, decoded, processed and sent through the
tower by itself, with Pillow, numpy and all threads for one forward. No batch, no cache.

Behind the same kind of HTTP server as ours, with the same request and the same reply.
"""

import asyncio
import base64
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from cli.bench_plain import picture_patches
from cli.bench_server import Announce, Serve
from encoder.checkpoint import read_json_object
from preprocess.config import ProcessorConfig
from preprocess.types import PATCH_SIZE, MediaOptions


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
                "shape": list(rows.shape),
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
        """Loads the tower. Raises CheckpointError."""
        import torch

        from encoder import load_towers

        self.use_threads(num_threads)
        tower = load_towers(model_dir, torch.float32, "cpu").vision
        if tower is None:
            raise ValueError(f"{model_dir} has no vision tower")
        self._tower = tower
        self._config = ProcessorConfig.from_hf(read_json_object(model_dir / "config.json"))

    def use_threads(self, num_threads: int) -> None:
        """For forwards of the calling thread."""
        import torch

        torch.set_num_threads(num_threads)

    def encode(self, content: bytes) -> NDArray[np.float32]:
        """[rows, width]"""
        return self.forward(self.prepare(content))

    def prepare(self, content: bytes) -> Prepared:
        """Decoded, resized, cut."""
        from PIL import Image

        from preprocess.resize import smart_resize

        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
        budget = self._config.image_budget(MediaOptions())
        size = smart_resize(height, width, min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
        return Prepared(picture_patches(content, size), size[0] // PATCH_SIZE, size[1] // PATCH_SIZE)

    def forward(self, prepared: Prepared) -> NDArray[np.float32]:
        """[rows, width]"""
        import torch

        with torch.inference_mode():
            rows = self._tower(torch.from_numpy(prepared.patches), [(1, prepared.height, prepared.width)])
        array: NDArray[np.float32] = rows.numpy()
        return array
