"""The encoder over real sockets and as real processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from encoder.client import ArenaReader, EncoderClient
from encoder.config import EncoderConfig
from encoder.errors import EmbeddingLost
from encoder.local import LocalEncoder
from encoder.process import open_server, serve
from encoder.server import EncoderServer
from encoder.types import EncodeReply
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaError
from preprocess.keys import media_key
from preprocess.types import MediaKey, MediaOptions, Modality

Media = list[tuple[bytes, Modality]]


@pytest.fixture
def media(make_png: Callable[..., bytes], make_wav: Callable[..., bytes], make_mp4: Callable[..., bytes]) -> Media:
    pictures = [(make_png(seed, 64 + 32 * seed, 96), Modality.IMAGE) for seed in range(4)]
    sounds = [(make_wav(1, 0.5), Modality.AUDIO), (make_wav(2, 4.0), Modality.AUDIO)]
    clips = [(make_mp4(1), Modality.VIDEO), (make_mp4(2, with_audio=True), Modality.VIDEO)]
    return pictures + sounds + clips


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/encoder.sock"


@asynccontextmanager
async def serving(model_dir: Path, address: str, config: EncoderConfig | None = None) -> AsyncIterator[EncoderServer]:
    stop = asyncio.Event()
    arena = f"t-{uuid.uuid4().hex}"
    with open_server(config or EncoderConfig(arena_bytes=2**22), model_dir=model_dir, name="e0", arena=arena) as server:
        task = asyncio.create_task(serve(server, address, stop))
        yield server
        stop.set()
        await task


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the thing observed lives in another task or process
            await asyncio.sleep(0.01)


def segments_of(arena: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{arena}*"))


class Keys:
    """What a gateway does: keys from content, settings and the encoder's fingerprint."""

    def __init__(self, model_dir: Path, fingerprint: str) -> None:
        self.processor = ProcessorConfig.from_hf(json.loads((model_dir / "config.json").read_text()))
        self.fingerprint = fingerprint

    def of(self, content: bytes, modality: Modality) -> MediaKey:
        return media_key(
            content,
            modality=modality,
            options=MediaOptions(),
            processor=self.processor,
            tower_fingerprint=self.fingerprint,
        )


async def encode(client: EncoderClient, keys: Keys, content: bytes, modality: Modality) -> EncodeReply:
    key = keys.of(content, modality)
    return await client.encode(content, modality, MediaOptions(), key, time.time() + 60)


async def test_the_server_gives_what_offline_encoding_gives_bit_for_bit(
    tiny_model_dir: Path, address: str, media: Media
) -> None:
    local = LocalEncoder(tiny_model_dir)
    expected = [local.encode(content, modality) for content, modality in media]
    reader = ArenaReader()
    async with serving(tiny_model_dir, address), EncoderClient.connect([address]) as client:
        keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
        replies = await asyncio.gather(*(encode(client, keys, *medium) for medium in media))
        for reply, (layout, rows, key, _) in zip(replies, expected, strict=True):
            assert reply.layout == layout
            assert reply.key == key
            assert np.array_equal(reader.array(reply.ref), rows)
            client.release(reply.ref)
        content, modality = media[0]
        deadline = time.time() + 60
        reply, frame = await client.encode_inline(content, modality, MediaOptions(), expected[0][2], deadline)
        assert reply.cached
        assert bytes(frame.data) == expected[0][1].tobytes()
    with pytest.raises(EmbeddingLost):
        ArenaReader().array(reply.ref)


async def test_two_hundred_requests_at_once_all_end(
    tiny_model_dir: Path, address: str, make_png: Callable[..., bytes]
) -> None:
    pictures = [make_png(seed, 64, 64) for seed in range(40)] + [b"no picture"] * 10
    async with serving(tiny_model_dir, address) as server, EncoderClient.connect([address]) as client:
        keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
        calls = [encode(client, keys, pictures[index % 50], Modality.IMAGE) for index in range(200)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, EncodeReply) for result in results) == 160
        assert sum(isinstance(result, MediaError) for result in results) == 40
        counters = server.info().counters
        assert counters["encoded"] == 40
        assert counters["batch_jobs"] / counters["batches"] > 1
        assert server.info().num_pending == 0
        for result in results:
            if isinstance(result, EncodeReply):
                client.release(result.ref)
        await until(lambda: not server.info().leased_bytes)


async def test_clients_that_vanish_leave_nothing_behind(
    tiny_model_dir: Path, address: str, make_png: Callable[..., bytes]
) -> None:
    async with serving(tiny_model_dir, address) as server, EncoderClient.connect([address]) as client:
        keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
        tasks = [asyncio.create_task(encode(client, keys, make_png(s, 64, 64), Modality.IMAGE)) for s in range(50)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            # One that was answered just before it was cancelled owns its lease like any other.
            if isinstance(ended, EncodeReply):
                client.release(ended.ref)
        await until(lambda: not server.info().num_pending and not server.info().leased_bytes)


async def test_frames_that_are_no_message_are_dropped(
    tiny_model_dir: Path, address: str, make_png: Callable[..., bytes]
) -> None:
    async with serving(tiny_model_dir, address), EncoderClient.connect([address]) as client:
        keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(address)
            for frames in ([b""], [b"\x80\x04garbage"], [b"\xff" * 100, b"more"], [b"cos\nsystem\n(S'true'\ntR."]):
                socket.send_multipart(frames)
            await asyncio.sleep(0.1)
        assert isinstance(await encode(client, keys, make_png(1), Modality.IMAGE), EncodeReply)


async def test_in_one_process_the_same_client_works_over_memory(
    tiny_model_dir: Path, make_png: Callable[..., bytes]
) -> None:
    arena = f"t-{uuid.uuid4().hex}"
    with open_server(EncoderConfig(arena_bytes=2**20), model_dir=tiny_model_dir, name="e0", arena=arena) as server:
        server.start()
        async with EncoderClient.embedded(server) as client:
            keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
            reply = await encode(client, keys, make_png(1), Modality.IMAGE)
            assert ArenaReader().array(reply.ref).shape == (12, 192)
        await server.stop()
        assert server.info().leased_bytes == 0, "a closed link holds no leases"


PROGRAM = """
import sys
from pathlib import Path
from encoder import run_encoder
from encoder.config import EncoderConfig
model_dir, name, address, arena = sys.argv[1:]
run_encoder(EncoderConfig(arena_bytes=2**22), model_dir=Path(model_dir), name=name, address=address, arena=arena)
"""


def start_process(model_dir: Path, address: str, arena: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, model_dir, "e0", address, arena], env=environment)


@pytest.fixture
def arena_name() -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex}"
    yield name
    for segment in segments_of(name):
        segment.unlink()


@pytest.mark.e2e
async def test_a_killed_replica_is_replaced_and_every_request_ends(
    tiny_model_dir: Path, address: str, arena_name: str, make_png: Callable[..., bytes]
) -> None:
    processes = [start_process(tiny_model_dir, address, arena_name)]
    try:
        async with EncoderClient.connect([address]) as client:
            keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
            before = await encode(client, keys, make_png(0), Modality.IMAGE)
            offline = LocalEncoder(tiny_model_dir).encode(make_png(0), Modality.IMAGE)[1]
            assert np.array_equal(ArenaReader().array(before.ref), offline), "another process, other thread settings"
            calls = [asyncio.create_task(encode(client, keys, make_png(s), Modality.IMAGE)) for s in range(1, 20)]
            await asyncio.sleep(0.02)
            processes[0].send_signal(signal.SIGKILL)
            processes[0].wait()
            processes.append(start_process(tiny_model_dir, address, arena_name))
            results = await asyncio.gather(*calls)
            assert all(isinstance(result, EncodeReply) for result in results)
            again = await encode(client, keys, make_png(0), Modality.IMAGE)
            assert again.ref.checksum == before.ref.checksum
            assert again.ref.arena != before.ref.arena
            assert np.isfinite(ArenaReader().array(again.ref)).all()
            left = [path for path in segments_of(arena_name) if not path.name.startswith(again.ref.arena)]
            assert left == [], "the dead process's arena is gone"
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(20) == 0
        assert not segments_of(arena_name)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.mark.e2e
async def test_with_two_replicas_a_kill_costs_no_waiting_for_the_restart(
    tiny_model_dir: Path, tmp_path: Path, make_png: Callable[..., bytes]
) -> None:
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in "ab"]
    arenas = [f"t-{uuid.uuid4().hex}" for _ in addresses]
    processes = [start_process(tiny_model_dir, *pair) for pair in zip(addresses, arenas, strict=True)]
    try:
        async with EncoderClient.connect(addresses) as client:
            await until(lambda: all(client.infos().values()), timeout_s=60)
            keys = Keys(tiny_model_dir, (await client.info()).fingerprint)
            calls = [asyncio.create_task(encode(client, keys, make_png(s), Modality.IMAGE)) for s in range(30)]
            await asyncio.sleep(0.01)
            processes[0].send_signal(signal.SIGKILL)
            results = await asyncio.gather(*calls)
            assert {result.ref.arena.partition(".")[0] for result in results} & {arenas[1]}
            assert len(results) == 30
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for arena in arenas:
            for segment in segments_of(arena):
                segment.unlink()
