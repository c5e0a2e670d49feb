"""The whole encoder in this dialect: real towers behind the real front, rows into a receiver's socket."""

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from encoder.client import EncoderClient
from encoder.config import EncoderConfig
from encoder.front.config import FrontConfig
from encoder.front.serving import FrontServer, running_front
from encoder.local import LocalEncoder
from encoder.process import open_server
from encoder.server import EncoderServer
from encoder.sglang.config import SglangConfig
from encoder.sglang.dialect import SglangDialect
from preprocess.config import FetchLimits
from preprocess.types import MediaOptions, Modality
from tests.fakes.encoder_peer import until
from tests.fakes.sglang_receiver import Receiver

Bytes = Callable[..., bytes]


@dataclass
class Whole:
    """The parts, and a session of the front."""

    server: EncoderServer
    front: FrontServer
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    @property
    def dialect(self) -> SglangDialect:
        found = self.front._dialect
        assert found is not None
        return found

    async def until_idle(self) -> None:
        gauges = self.dialect.gauges
        await until(lambda: not any(gauges()[name] for name in ("parts", "leases", "messages", "waiting_receivers")))
        await until(lambda: self.server.info().num_pending == 0 and self.server.info().leased_bytes == 0)


@asynccontextmanager
async def whole(
    model_dir: Path, encoder: EncoderConfig | None = None, fetch: FetchLimits | None = None, **settings: Any
) -> AsyncIterator[Whole]:
    config = FrontConfig(model_dir=model_dir, model_name="tiny", port=0, fetch=fetch or FetchLimits(), drain_s=3.0)
    encoder = encoder or EncoderConfig(arena_bytes=2**23)
    with open_server(encoder, model_dir=model_dir, name="e0", arena=f"t-{uuid.uuid4().hex}") as server:
        server.start()
        async with (
            EncoderClient.embedded(server) as client,
            running_front(config, client, SglangConfig(**settings)) as front,
            aiohttp.ClientSession(f"http://127.0.0.1:{front.port}") as http,
        ):
            yield Whole(server, front, http)
        await server.stop(5.0)


@pytest.fixture
def receiver() -> Any:
    opened = Receiver()
    yield opened
    opened.close()


def part(modality: Modality, items: object, name: str, receiver: Receiver) -> dict[str, object]:
    return {
        "req_id": f"{name}_local_part_0",
        "num_parts": 1,
        "part_idx": 0,
        "modality": modality.name,
        "mm_items": items,
        "prefill_host": "127.0.0.1",
        "embedding_port": receiver.port,
    }


def bare(content: bytes) -> str:
    return base64.b64encode(content).decode()


def bits(rows: "np.ndarray[Any, np.dtype[np.float32]]", dtype: str) -> bytes:
    """Widened rows as the tower made them."""
    return rows.tobytes() if dtype == "float32" else (rows.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_rows_are_those_of_the_towers(
    tiny_model_dir: Path, receiver: Receiver, make_png: Bytes, make_wav: Bytes, make_mp4: Bytes, dtype: Any
) -> None:
    config = EncoderConfig(arena_bytes=2**23, dtype=dtype)
    local = LocalEncoder(tiny_model_dir, config)
    media = {
        Modality.IMAGE: [make_png(1), make_png(2, 64, 64), make_png(1)],
        Modality.VIDEO: [make_mp4(3), make_mp4(2, with_audio=True)],
        Modality.AUDIO: [make_wav(3), make_wav(4, 0.3)],
    }
    async with whole(tiny_model_dir, config, send_video_sound=True) as parts:
        for modality, contents in media.items():
            options = {"fps": 2} if modality is Modality.VIDEO else {}
            items = [{"url": bare(content), **options} for content in contents]
            assert await parts.post("/encode", part(modality, items, modality, receiver)) == (200, None)
            message = await receiver.receive()
            expected = [local.encode(content, modality, MediaOptions(**options)) for content in contents]
            layouts = [one.layout for one in expected]
            is_sound = modality is Modality.AUDIO
            own = [one.num_rows if is_sound else one.num_vision_tokens for one in layouts]
            rows = np.concatenate([one.rows[:num] for one, num in zip(expected, own, strict=True)])
            header = message.header
            assert header.shape == rows.shape
            assert header.dtype == dtype
            assert message.rows == bits(rows, dtype)
            assert header.grid == tuple((one.num_rows,) if is_sound else one.grid_thw for one in layouts)
            if modality is Modality.VIDEO:
                assert header.video_timestamps == tuple(t for one in layouts for t in one.timestamps_s)
                assert header.audio_units == (0, len(layouts[1].audio_slices))
                assert header.audio_lengths == tuple(length for _, length in layouts[1].audio_slices)
                assert header.audio_rows is not None
                assert header.audio_rows.dtype == dtype
                assert header.audio_rows.content == bits(expected[1].rows[own[1] :], dtype)
            await parts.until_idle()
    local.close()


async def test_one_medium_is_read_where_it_lies(tiny_model_dir: Path, receiver: Receiver, make_png: Bytes) -> None:
    """Twice the same: the second comes from the cache, in the same bytes."""
    async with whole(tiny_model_dir) as parts:
        got = []
        for name in "ab":
            call = part(Modality.IMAGE, bare(make_png(1, 256, 256)), name, receiver)
            assert (await parts.post("/encode", call))[0] == 200
            got.append(await receiver.receive())
        assert got[0].rows == got[1].rows
        assert parts.server.info().num_cached == 1
        await parts.until_idle()
        async with parts.http.get("/metrics") as response:
            samples = (await response.text()).splitlines()
        for line in ('{what="leases"} 0.0', '{what="parts"} 0.0', '{what="ended_parts"} 2.0'):
            assert f"mimo_encoder_sglang{line}" in samples


async def test_paths_are_read_under_the_roots_only(
    tiny_model_dir: Path, receiver: Receiver, make_png: Bytes, tmp_path: Path
) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a cat.png").write_bytes(make_png(1))
    async with whole(tiny_model_dir, fetch=FetchLimits(media_roots=(inside,))) as parts:
        ok = part(Modality.IMAGE, str(inside / "a cat.png"), "a", receiver)
        assert (await parts.post("/encode", ok))[0] == 200
        assert (await receiver.receive()).rows is not None
        for path in (outside / "a cat.png", inside / ".." / "out" / "a cat.png", "/etc/passwd.png"):
            status, answer = await parts.post("/encode", part(Modality.IMAGE, str(path), "b", receiver))
            assert status == 400
            assert "media root" in answer["message"]
            assert (await receiver.receive()).header.error_code == 400
    async with whole(tiny_model_dir) as parts:
        assert (await parts.post("/encode", ok))[0] == 400


async def test_bad_media_are_bad_requests(tiny_model_dir: Path, receiver: Receiver, make_png: Bytes) -> None:
    async with whole(tiny_model_dir, fetch=FetchLimits(timeout_s=2.0)) as parts:
        whole_png = make_png(1)
        for i, item in enumerate(
            [bare(b"no picture"), bare(whole_png[:40]), "http://127.0.0.1:9/x.png", "ftp://a/b.png"]
        ):
            status, answer = await parts.post(
                "/encode", part(Modality.IMAGE, [bare(whole_png), item], f"n{i}", receiver)
            )
            assert (status, answer["status"], answer["req_id"]) == (400, "error", f"n{i}_local_part_0")
            failure = (await receiver.receive()).header
            assert (failure.error_code, failure.error_msg) == (400, answer["message"])
        item = {"url": bare(whole_png), "content_hash": "sha256:" + "00" * 32}
        assert (await parts.post("/encode", part(Modality.IMAGE, item, "hash", receiver)))[0] == 400
        await parts.until_idle()


async def test_callers_that_leave_after_50_ms(tiny_model_dir: Path, receiver: Receiver, make_png: Bytes) -> None:
    async with whole(tiny_model_dir) as parts:
        calls = [
            part(Modality.IMAGE, bare(make_png(i)), f"n{i}", receiver) | {"embedding_port": None} for i in range(60)
        ]
        tasks = [asyncio.create_task(parts.post("/encode", call)) for call in calls]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await parts.until_idle()
        assert (await parts.post("/encode", part(Modality.IMAGE, bare(make_png(1)), "after", receiver)))[0] == 200
        assert (await receiver.receive()).header.req_id == "after_local_part_0"


async def test_health_is_the_fronts(tiny_model_dir: Path) -> None:
    async with whole(tiny_model_dir) as parts:
        for path in ("/health", "/health_generate"):
            async with parts.http.get(path) as response:
                assert response.status == 200
