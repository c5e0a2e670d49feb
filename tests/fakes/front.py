"""A front over a real encoder server in the same process, and a client of it."""

import base64
import io
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from encoder.client import EncoderClient
from encoder.config import EncoderConfig
from encoder.front.config import FrontConfig
from encoder.front.serving import FrontServer, running_front
from encoder.process import open_server
from encoder.server import EncoderServer
from encoder.sglang.config import SglangConfig
from preprocess.config import FetchLimits
from preprocess.types import Modality
from tests.fakes.encoder_peer import until


@dataclass(frozen=True)
class Fronted:
    """The parts, and a session whose base is the front."""

    server: EncoderServer
    client: EncoderClient
    front: FrontServer
    http: aiohttp.ClientSession

    async def encode(self, *items: dict[str, Any], **fields: Any) -> tuple[int, Any]:
        """Status and body of `POST /v1/encode`."""
        # Not as json=..., of which aiohttp thinks that it is too much.
        body = io.BytesIO(json.dumps({"input": list(items), **fields}).encode())
        headers = {"Content-Type": "application/json"}
        async with self.http.post("/v1/encode", data=body, headers=headers) as response:
            return response.status, await response.json()

    async def metric(self, line: str) -> float:
        """The value of a sample, by its name and labels as they are written; 0 for none."""
        async with self.http.get("/metrics") as response:
            text = await response.text()
        return next((float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(f"{line} ")), 0.0)

    async def until_idle(self) -> None:
        """Nothing is in flight anywhere, and no lease is left."""
        await until(lambda: self.front.desk.num_inflight == 0)
        await until(lambda: self.server.info().num_pending == 0 and self.server.info().leased_bytes == 0)


@asynccontextmanager
async def fronted(
    model_dir: Path,
    *,
    encoder: EncoderConfig | None = None,
    fetch: FetchLimits | None = None,
    sglang: SglangConfig | None = None,
    **settings: Any,
) -> AsyncIterator[Fronted]:
    """A front on a free port."""
    encoder = encoder or EncoderConfig(arena_bytes=2**23)
    config = FrontConfig(
        model_dir=model_dir, model_name="tiny", port=0, fetch=fetch or FetchLimits(), **({"drain_s": 5.0} | settings)
    )
    with open_server(encoder, model_dir=model_dir, name="e0", arena=f"t-{uuid.uuid4().hex}") as server:
        server.start()
        async with (
            EncoderClient.embedded(server) as client,
            running_front(config, client, sglang) as front,
            aiohttp.ClientSession(f"http://127.0.0.1:{front.port}") as http,
        ):
            yield Fronted(server, client, front, http)
        await server.stop(5.0)


def data_url(content: bytes) -> str:
    return f"data:;base64,{base64.b64encode(content).decode()}"


def part(content: bytes, modality: Modality | str = "image", **options: Any) -> dict[str, Any]:
    """The medium as a part of a request."""
    return {"type": f"{modality}_url", f"{modality}_url": {"url": data_url(content), **options}}


def rows_of(item: dict[str, Any]) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """As the documentation says."""
    return np.frombuffer(base64.b64decode(item["embedding"]), np.float32).reshape(item["rows"], item["width"])
