"""A worker thread whose requests bring media: woken by rows, and clean after any number of requests and aborts."""

import asyncio
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import xxhash

from encoder.types import EmbeddingRef
from epd.engine import loop as engine_loop
from epd.engine.feed import Deliver
from epd.engine.row_source import HostSource
from epd.engine.worker import Engine, build_engine
from epd.transport.memory import MemoryNetwork
from epd.transport.sockets import WorkerChannel, WorkerEndpoint
from epd.types import Abort, FinishReason, GenerateRequest, MediaSpan, Role, Submit, ToWorker
from tests.engine.conftest import Checkpoint, make_request
from tests.engine.test_worker import FAR_S, PATIENCE_S, Client, config

WIDTH = 64
NUM_ROWS = 400


class LateSource(HostSource):
    """The real source, after the worker has gone to sleep."""

    def fetch(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        timer = threading.Timer(0.3, super().fetch, (ref, deadline_unix_s, deliver))
        timer.start()
        return timer.cancel


@asynccontextmanager
async def running(
    checkpoint: Checkpoint, kind: str, folder: Path, source: HostSource
) -> AsyncIterator[tuple[Engine, Client, Callable[[ToWorker], Awaitable[None]]]]:
    """A worker's loop in a thread, a client of it, and how to send to it."""
    network = MemoryNetwork()
    address = f"ipc://{folder}/worker"
    endpoint = network.endpoint("worker") if kind == "memory" else WorkerEndpoint(address)
    channel = network.channel("worker") if kind == "memory" else WorkerChannel(address)
    engine = build_engine(config(checkpoint.folder, Role.BOTH), endpoint, model=checkpoint.model, embeddings=source)
    thread = threading.Thread(target=engine.loop.run)
    thread.start()
    channel.open()
    await asyncio.wait_for(channel.wait_connected(), PATIENCE_S)
    client = Client(channel)
    try:
        yield engine, client, channel.send
    finally:
        engine.loop.stop()
        await asyncio.to_thread(thread.join, PATIENCE_S)
        await client.close()
        channel.close()
        endpoint.close()


@pytest.fixture
def segments() -> Iterator[list[EmbeddingRef]]:
    """Three embeddings in shared memory, and one whose arena is gone."""
    refs, paths = [], []
    for number in range(4):
        rows = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        content = rows.view(torch.uint8).numpy().tobytes()
        path = Path("/dev/shm") / f"t-{uuid.uuid4().hex}"
        if number < 3:
            path.write_bytes(content)
        paths.append(path)
        refs.append(
            EmbeddingRef(
                key=f"{number:032x}",  # type: ignore[arg-type]
                arena=path.name,
                offset_bytes=0,
                num_rows=NUM_ROWS,
                width=WIDTH,
                dtype="float32",
                checksum=xxhash.xxh3_64_intdigest(content),
                lease_id=f"lease-{number}",
            )
        )
    yield refs
    for path in paths:
        path.unlink(missing_ok=True)


def asked(request_id: str, *refs: EmbeddingRef) -> GenerateRequest:
    token_ids, spans = [1], []
    for media, ref in enumerate(refs):
        start = len(token_ids)
        token_ids += [126] * 7 + [media]
        spans.append(MediaSpan(start=start, stop=start + 7, key=ref.key, row_start=3, media=media))
    return make_request(
        request_id,
        token_ids,
        max_tokens=4,
        spans=tuple(spans),
        embeddings=refs,
        ignore_eos=True,
        deadline_unix_s=time.time() + FAR_S,
    )


@pytest.mark.parametrize("kind", ["ipc", "memory"])
async def test_rows_wake_a_worker_that_sleeps(
    checkpoint: Checkpoint,
    segments: list[EmbeddingRef],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loop, "_IDLE_WAIT_S", 3600.0)
    async with running(checkpoint, kind, tmp_path, LateSource(timeout_s=60.0)) as (_, client, send):
        await send(Submit(request=asked("a", segments[0])))
        await client.until(lambda: "a" in client.finishes)
    assert client.finishes["a"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["ipc", "memory"])
async def test_a_storm_of_media_and_aborts_leaves_nothing(
    checkpoint: Checkpoint, segments: list[EmbeddingRef], kind: str, tmp_path: Path
) -> None:
    chance = random.Random(3)
    num_threads = threading.active_count()
    async with running(checkpoint, kind, tmp_path, HostSource(timeout_s=60.0)) as (engine, client, send):
        names: list[str] = []
        for number in range(80):
            refs = chance.sample(segments[:3], chance.randint(1, 3))
            names.append(f"lost-{number}" if number % 10 == 9 else f"r{number}")
            refs += segments[3:] if number % 10 == 9 else []
            await send(Submit(request=asked(names[-1], *refs)))
            if number % 3 == 0:
                await send(Abort(request_id=chance.choice(names)))
            if number % 20 == 0:
                await asyncio.sleep(0.02)
        await client.until(lambda: len(client.finishes) == len(names))
        until_s = time.monotonic() + PATIENCE_S
        while engine.feed.num_requests and time.monotonic() < until_s:  # noqa: ASYNC110 - it lives on another thread
            await asyncio.sleep(0.01)
        assert (engine.feed.held_bytes, engine.feed.num_requests) == (0, 0)
    assert engine.cache.stats().full.leased == 0
    for name, finish in client.finishes.items():
        if finish.reason is FinishReason.FAILED:
            assert name.startswith("lost")
            assert (finish.code, finish.retryable) == ("embedding_lost", True)
        else:
            assert finish.reason is FinishReason.CANCELLED or not name.startswith("lost")
    assert threading.active_count() <= num_threads + 1, "at most the event loop's own helper is left"
