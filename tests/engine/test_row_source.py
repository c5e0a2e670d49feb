"""Rows out of an arena of this host, and as frames where there is none; a worker's step never waits for either."""

import mmap
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import xxhash
import zmq
from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef, FetchRows, FromEncoder, Rows, ToEncoder
from encoder.wire import Codec, TensorFrame
from epd.config import EngineConfig
from epd.engine.row_source import HostSource
from epd.engine.worker import build_engine
from epd.model.embed import EmbeddingSpan
from epd.types import Finish, MediaSpan, Role, SamplingParams, Submit, TokenDelta
from tests.engine.conftest import Checkpoint, make_request
from tests.fakes.mailbox import Mailbox
from tests.oracles.plain_generate import plain_generate

PATIENCE_S = 60.0
WIDTH = 64


class Segment:
    """Rows in shared memory, as an encoder leaves them."""

    def __init__(self, rows_RD: Tensor) -> None:
        self.rows = rows_RD
        self.content = rows_RD.contiguous().view(torch.uint8).numpy().tobytes()
        self.name = f"t-{uuid.uuid4().hex}"
        self.path = Path("/dev/shm") / self.name
        self.path.write_bytes(self.content)

    def ref(self, **changes: object) -> EmbeddingRef:
        values: dict[str, object] = {
            "key": f"{xxhash.xxh3_64_intdigest(self.content):032x}",
            "arena": self.name,
            "offset_bytes": 0,
            "num_rows": self.rows.shape[0],
            "width": self.rows.shape[1],
            "dtype": str(self.rows.dtype).removeprefix("torch."),
            "checksum": xxhash.xxh3_64_intdigest(self.content),
            "lease_id": "lease",
        }
        return EmbeddingRef(**(values | changes))  # type: ignore[arg-type]

    def overwrite(self) -> None:
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[:] = bytes(len(mapped))


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16])
def segment(request: pytest.FixtureRequest) -> Iterator[Segment]:
    segment = Segment(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)).to(request.param))
    yield segment
    segment.path.unlink(missing_ok=True)


@pytest.fixture
def source() -> Iterator[HostSource]:
    source = HostSource(timeout_s=PATIENCE_S)
    yield source
    source.close()


@pytest.fixture
def frames() -> Iterator[str]:
    """An encoder that knows every key; its rows are zeros, 24 of them. Gives its address."""
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    incoming: Codec[ToEncoder] = Codec(ToEncoder)
    outgoing: Codec[FromEncoder] = Codec(FromEncoder)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not socket.poll(20):
                continue
            peer, *received = socket.recv_multipart()
            message, _ = incoming.decode(received)
            assert isinstance(message, FetchRows)
            zeros = TensorFrame("float32", (24, WIDTH), bytes(24 * WIDTH * 4))
            socket.send_multipart([peer, *outgoing.encode(Rows(request_id=message.request_id), [zeros])])

    thread = threading.Thread(target=serve)
    thread.start()
    yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
    stop.set()
    thread.join()
    context.destroy(linger=0)


def fetched(source: HostSource, ref: EmbeddingRef) -> Tensor | EmbeddingLost:
    delivered: SimpleQueue[Tensor | EmbeddingLost] = SimpleQueue()
    source.fetch(ref, time.time() + PATIENCE_S, delivered.put)
    return delivered.get(timeout=PATIENCE_S)


def test_rows_of_this_host_are_right_whatever_becomes_of_the_arena(source: HostSource, segment: Segment) -> None:
    rows = fetched(source, segment.ref())
    assert isinstance(rows, Tensor)
    segment.overwrite()
    assert torch.equal(rows, segment.rows)
    assert isinstance(fetched(source, segment.ref()), EmbeddingLost), "overwritten rows are not what the key names"


@pytest.mark.parametrize("changes", [{"arena": "gone"}, {"offset_bytes": 8}, {"checksum": 5}, {"dtype": "nonsense"}])
def test_what_is_not_there_is_lost(source: HostSource, segment: Segment, changes: dict[str, object]) -> None:
    assert isinstance(fetched(source, segment.ref(**changes)), EmbeddingLost)
    assert isinstance(fetched(source, segment.ref()), Tensor), "the next is read all the same"


def test_rows_of_another_host_come_as_frames(source: HostSource, frames: str) -> None:
    zeros = Segment(torch.zeros(24, WIDTH))
    zeros.path.unlink()
    rows = fetched(source, zeros.ref(source=frames))
    assert isinstance(rows, Tensor)
    assert torch.equal(rows, zeros.rows)
    other = fetched(source, zeros.ref(source=frames, checksum=5))
    assert isinstance(other, EmbeddingLost), "frames are held against the reference's checksum"


def test_an_arena_of_the_same_name_on_another_host_is_no_trap(source: HostSource, frames: str) -> None:
    mine, theirs = Segment(torch.ones(24, WIDTH)), Segment(torch.zeros(24, WIDTH))
    rows = fetched(source, theirs.ref(source=frames, arena=mine.name))
    assert isinstance(rows, Tensor)
    assert torch.equal(rows, theirs.rows)
    for segment in (mine, theirs):
        segment.path.unlink()


def test_a_cancelled_fetch_does_not_hold_up_the_next(source: HostSource, segment: Segment) -> None:
    delivered: SimpleQueue[Tensor | EmbeddingLost] = SimpleQueue()
    for _ in range(20):
        source.fetch(segment.ref(), time.time() + PATIENCE_S, delivered.put)()
    assert isinstance(fetched(source, segment.ref()), Tensor)
    source.close()
    source.close()


def test_a_worker_reads_media_beside_its_steps(checkpoint: Checkpoint, segment: Segment) -> None:
    """The whole way with the real source: the rows are in the answer, and the arena was read on another thread."""
    config = EngineConfig(
        model_dir=checkpoint.folder,
        model_name="tiny",
        role=Role.BOTH,
        page_size=4,
        kv_budget_bytes=4 << 20,
        expected_sequence_tokens=128,
    )
    mailbox = Mailbox()
    engine = build_engine(replace(config, chunk_tokens=16), mailbox, model=checkpoint.model)
    span = MediaSpan(start=3, stop=27, key=segment.ref().key, row_start=0, media=0)
    token_ids = [1, 2, 3, *[126] * 24, 4]
    late = time.time() + PATIENCE_S
    asked = make_request(
        "a", token_ids, spans=(span,), embeddings=(segment.ref(),), ignore_eos=True, deadline_unix_s=late
    )
    mailbox.put(Submit(request=asked))
    answer: list[int] = []
    finish = None
    until_s = time.monotonic() + PATIENCE_S
    while finish is None and time.monotonic() < until_s:
        engine.loop.step()
        for message in mailbox.take():
            if isinstance(message, TokenDelta):
                answer += message.token_ids
            elif isinstance(message, Finish):
                finish = message
    engine.feed.close()
    assert finish is not None
    assert finish.status == 200, finish.message
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    placed = [EmbeddingSpan(3, 27, segment.rows)]
    assert answer == plain_generate(checkpoint.model, token_ids, sampling, placed)
    assert engine.feed.held_bytes == 0
