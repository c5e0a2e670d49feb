"""`POST /v1/encode` of a gateway: word for word what a front says of the same encoder, and files and keys beside."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from epd.config import GatewayConfig
from epd.gateway.app import create_app, start_gateway
from epd.gateway.render import Renderer
from epd.gateway.template import ChatTemplate
from epd.gateway.vocabulary import Vocabulary
from preprocess.config import FetchLimits
from preprocess.fetch import Fetcher
from tests.fakes.front import Fronted, data_url, fronted, part, rows_of
from tests.fakes.gateway import MODEL_DIR, processor_config, running_gateway, tiny_renderer

Bytes = Callable[..., bytes]


def renderer_of(model_dir: Path) -> Renderer:
    """The built-in tokenizer and template, with the processor of a checkpoint that has towers alone."""
    vocabulary = Vocabulary.load(MODEL_DIR / "tokenizer.json")
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    config["processor_config"] |= processor_config(vocabulary)
    config |= {"max_position_embeddings": 4096, "eos_token_id": vocabulary.special_ids["<|im_end|>"]}
    template = ChatTemplate.load(MODEL_DIR)
    return Renderer(vocabulary=vocabulary, template=template, config=config, generation={"do_sample": False})


@dataclass(frozen=True)
class Both:
    """A front and a gateway over one encoder."""

    front: Fronted
    gateway: aiohttp.ClientSession

    async def ask(self, *items: Any, **fields: Any) -> tuple[int, Any]:
        """Of the gateway."""
        headers = {"Content-Type": "application/json"}
        data = json.dumps({"input": list(items), **fields}).encode()
        async with self.gateway.post("/v1/encode", data=data, headers=headers) as response:
            return response.status, await response.json()

    async def upload(self, content: bytes) -> str:
        form = aiohttp.FormData({"purpose": "vision"})
        form.add_field("file", content, filename="name")
        async with self.gateway.post("/v1/files", data=form) as response:
            file_id: str = (await response.json())["id"]
            return file_id


@asynccontextmanager
async def both(model_dir: Path, files_dir: Path) -> AsyncIterator[Both]:
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(fronted(model_dir))
        fetcher = await stack.enter_async_context(Fetcher(FetchLimits()))
        config = GatewayConfig(model_dir=model_dir, model_name="tiny", files_dir=files_dir, drain_s=1.0)
        app = create_app(
            config, renderer=renderer_of(model_dir), fetcher=fetcher, encoder=front.client, prefill=[], decode=[]
        )
        runner, port = await start_gateway(app, host="127.0.0.1", port=0)
        stack.push_async_callback(runner.cleanup)
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        yield Both(front, session)
        await front.until_idle()


def untimed(answer: Any) -> Any:
    """Without what differs from one time to the next."""
    for item in answer.get("data", ()):
        item.pop("timings", None)
        item.pop("cached", None)
    return answer


async def test_answers_are_those_of_a_front(
    tiny_model_dir: Path, tmp_path: Path, make_png: Bytes, make_wav: Bytes, make_mp4: Bytes
) -> None:
    items: list[Any] = [
        part(make_png(1)),
        part(make_mp4(1, with_audio=True), "video", fps=2),
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(make_wav(1)).decode(), "format": "wav"}},
        part(b"no picture"),
        {"type": "file", "file": {"file_data": data_url(make_png(2))}},
        {"type": "image_url", "key": "0" * 32},
        {"type": "text", "text": "hi"},
        part(make_png(1), max_pixels=1),
    ]
    async with both(tiny_model_dir, tmp_path) as parts:
        for fields in ({}, {"encoding_format": "float"}, {"model": "tiny"}):
            expected = await parts.front.encode(*items, **fields)
            status, answer = await parts.ask(*items, **fields)
            assert (status, untimed(answer)) == (expected[0], untimed(expected[1]))
        for fault in ({"model": "other"}, {"encoding_format": "x"}, {"colour": 1}):
            expected = await parts.front.encode(*items, **fault)
            assert await parts.ask(*items, **fault) == expected
        for one in items[3:]:
            expected = await parts.front.encode(one)
            status, answer = await parts.ask(one)
            assert (status, untimed(answer)) == (expected[0], untimed(expected[1]))


async def test_forms_and_safetensors(tiny_model_dir: Path, tmp_path: Path, make_png: Bytes) -> None:
    async with both(tiny_model_dir, tmp_path) as parts:
        bodies = []
        for session in (parts.front.http, parts.gateway):
            form = aiohttp.FormData({"max_pixels": "8192"})
            form.add_field("image", make_png(1), filename="../a.png", content_type="text/html")
            async with session.post("/v1/encode", data=form) as response:
                assert response.status == 200
                assert response.headers["X-Request-Id"]
                bodies.append(untimed(await response.json()))
        assert bodies[0] == bodies[1]
        headers = {"Accept": "application/x-safetensors"}
        async with parts.gateway.post("/v1/encode", json={"input": [part(make_png(1))]}, headers=headers) as response:
            assert response.content_type == "application/x-safetensors"
            raw = await response.read()
            assert len(raw) == int(response.headers["Content-Length"])
        _, answer = await parts.ask(part(make_png(1)))
        rows = rows_of(answer["data"][0])
        assert np.array_equal(np.frombuffer(raw, np.float32, rows.size, len(raw) - rows.nbytes), rows.ravel())


async def test_uploaded_files(tiny_model_dir: Path, tmp_path: Path, make_png: Bytes, make_wav: Bytes) -> None:
    async with both(tiny_model_dir, tmp_path) as parts:
        picture, sound, text = [await parts.upload(content) for content in (make_png(1), make_wav(1), b"hello")]
        _, expected = await parts.front.encode(part(make_png(1)), part(make_wav(1), "audio"))
        status, answer = await parts.ask(
            {"type": "file", "file": {"file_id": picture}},
            {"type": "file", "file": {"file_id": sound}},
            {"type": "image_url", "image_url": {"file_id": picture}},
            {"type": "file", "file": {"file_id": text}},
            {"type": "file", "file": {"file_id": "file-" + "0" * 32}},
            {"type": "image_url", "image_url": {"file_id": "../../etc/passwd"}},
        )
        assert status == 200
        keys = [item["key"] for item in expected["data"]]
        assert [item.get("key") for item in answer["data"]] == [*keys, keys[0], None, None, None]
        errors = [(item["status"], item["error"]["param"]) for item in answer["data"][3:]]
        assert errors == [
            (415, "input[3].file.file_id"),
            (404, "input[4].file.file_id"),
            (404, "input[5].image_url.file_id"),
        ]


async def test_a_model_without_towers_says_so() -> None:
    renderer = tiny_renderer()
    renderer.processor = None
    async with (
        running_gateway(renderer=renderer) as stack,
        stack.session.post("/v1/encode", json={"input": []}) as response,
    ):
        assert response.status == 400
        assert "text only" in (await response.json())["error"]["message"]


async def test_a_body_that_does_not_come_takes_nobody_s_place() -> None:
    async with running_gateway(max_inflight=1, body_timeout_s=0.5) as stack:
        given_up = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"input"'
            status, _, _ = await stack.ask("hello")
            assert status == 200
            await given_up.wait()

        headers = {"Content-Type": "application/json"}
        async with stack.session.post("/v1/encode", data=slow(), headers=headers) as response:
            assert response.status == 408
        given_up.set()
