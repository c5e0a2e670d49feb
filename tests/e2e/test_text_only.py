"""A model of text alone, from a GGUF file, in one process: no encoder, and media are refused."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from cli.load import load
from cli.unified import unified_server
from tests.e2e.service import file_url
from tests.fakes.tiny_gguf import write_gguf

pytestmark = pytest.mark.e2e


async def is_ready(session: aiohttp.ClientSession) -> bool:
    async with session.get("/ready") as response:
        assert "encoder" not in await response.text()
        return response.status == 200


async def test_the_pipeline_runs_without_an_encoder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    flags = {
        "mode": "unified",
        "model": str(path),
        "gateway": {"port": 0},
        # The tiny model's context is 256 tokens.
        "engine": {"expected_sequence_tokens": 256, "kv_budget_bytes": 16 << 20},
    }
    config = load(runtime_dir=tmp_path, flags=flags, environ={"MIMO_CACHE_DIR": str(tmp_path / "cache")})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello 12"}], "max_tokens": 8}
    part = {"type": "image_url", "image_url": {"url": file_url("picture.png")}}
    async with unified_server(config) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for _ in range(1200):
            if await is_ready(session):
                break
            await asyncio.sleep(0.05)
        async with session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert answer["usage"]["completion_tokens"] >= 1
        body["messages"] = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
        async with session.post("/v1/chat/completions", json=body) as response:
            refused = await response.json()
            assert response.status == 400
            assert "text only" in refused["error"]["message"]
