"""Rows as frames over TCP, against an encoder that does what the test says."""

import socket as sockets
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import xxhash
import zmq

from encoder.errors import EmbeddingLost
from encoder.types import (
    EmbeddingRef,
    EncodeFailure,
    Farewell,
    FetchRows,
    FromEncoder,
    Goodbye,
    Rows,
    ToEncoder,
)
from encoder.wire import Codec, TensorFrame
from epd.transport.rows import RowsClient

# No test is about speed: only about what comes before what.
PATIENCE_S = 30.0
NUM_ROWS, WIDTH = 6, 8


class ScriptedEncoder:
    """A ROUTER on loopback, in the test's own thread."""

    def __init__(self) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._in: Codec[ToEncoder] = Codec(ToEncoder)
        self._out: Codec[FromEncoder] = Codec(FromEncoder)
        self.peer = b""

    def receive(self) -> ToEncoder:
        self.peer, *frames = self.socket.recv_multipart()
        return self._in.decode(frames)[0]

    def asked(self) -> FetchRows:
        message = self.receive()
        assert isinstance(message, FetchRows)
        return message

    def send(self, message: FromEncoder, *tensors: TensorFrame) -> None:
        self.socket.send_multipart([self.peer, *self._out.encode(message, tensors)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def encoder() -> Iterator[ScriptedEncoder]:
    encoder = ScriptedEncoder()
    yield encoder
    encoder.close()


@pytest.fixture
def client() -> Iterator[RowsClient]:
    client = RowsClient()
    yield client
    client.close()


def content(name: int) -> bytes:
    return bytes([name]) * (NUM_ROWS * WIDTH * 4)


def frame(name: int) -> TensorFrame:
    return TensorFrame("float32", (NUM_ROWS, WIDTH), content(name))


def ref(address: str, name: int = 1) -> EmbeddingRef:
    return EmbeddingRef(
        key=f"{name:032x}",  # type: ignore[arg-type]
        arena="of-another-host",
        offset_bytes=0,
        num_rows=NUM_ROWS,
        width=WIDTH,
        dtype="float32",
        checksum=xxhash.xxh3_64_intdigest(content(name)),
        lease_id="lease",
        source=address,
    )


class Answers:
    """What was delivered, in order."""

    def __init__(self) -> None:
        self.delivered: SimpleQueue[TensorFrame | EmbeddingLost] = SimpleQueue()

    def __call__(self, result: TensorFrame | EmbeddingLost) -> None:
        self.delivered.put(result)

    def next(self) -> TensorFrame | EmbeddingLost:
        return self.delivered.get(timeout=PATIENCE_S)

    def loss(self) -> str:
        result = self.next()
        assert isinstance(result, EmbeddingLost)
        assert self.delivered.empty(), "delivered once"
        return result.message


def soon() -> float:
    return time.time() + PATIENCE_S


def test_each_question_gets_its_own_answer_in_any_order(encoder: ScriptedEncoder, client: RowsClient) -> None:
    answers = [Answers() for _ in range(5)]
    for name, answer in enumerate(answers):
        client.ask(ref(encoder.address, name), soon(), answer)
    asked = [encoder.asked() for _ in answers]
    for message in reversed(asked):
        encoder.send(Rows(request_id=message.request_id), frame(int(message.key, 16)))
    for name, answer in enumerate(answers):
        got = answer.next()
        assert isinstance(got, TensorFrame)
        assert bytes(got.data) == content(name)
        assert got.shape == (NUM_ROWS, WIDTH)


def test_an_encoder_that_lost_the_rows_says_so(encoder: ScriptedEncoder, client: RowsClient) -> None:
    answer = Answers()
    client.ask(ref(encoder.address), soon(), answer)
    message = encoder.asked()
    encoder.send(EncodeFailure(request_id=message.request_id, code="embedding_lost", message="evicted", status=503))
    assert answer.loss() == "evicted"


def test_a_refused_connection_is_a_loss_at_once(client: RowsClient) -> None:
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    answer = Answers()
    client.ask(ref(address), time.time() + 3600, answer)
    assert "cannot be reached" in answer.loss()
    client.ask(ref("tcp://"), time.time() + 3600, answer)
    assert "cannot be reached" in answer.loss()


def test_a_connection_that_breaks_ends_all_that_was_asked(encoder: ScriptedEncoder, client: RowsClient) -> None:
    answers = [Answers() for _ in range(3)]
    for name, answer in enumerate(answers):
        client.ask(ref(encoder.address, name), time.time() + 3600, answer)
    for _ in answers:
        encoder.asked()
    encoder.close()
    for answer in answers:
        assert "closed the connection" in answer.loss()


def test_an_encoder_that_says_nothing_costs_its_own_questions(encoder: ScriptedEncoder, client: RowsClient) -> None:
    silent, answered = Answers(), Answers()
    client.ask(ref(encoder.address), time.time() + 0.2, silent)
    other = ScriptedEncoder()
    client.ask(ref(other.address), soon(), answered)
    other.send(Rows(request_id=other.asked().request_id), frame(1))
    assert isinstance(answered.next(), TensorFrame)
    other.close()
    assert "in time" in silent.loss()
    message = encoder.asked()
    encoder.send(Rows(request_id=message.request_id), frame(1))
    client.ask(ref(encoder.address, 2), soon(), answered)
    encoder.send(Rows(request_id=encoder.asked().request_id), frame(2))
    got = answered.next()
    assert isinstance(got, TensorFrame)
    assert bytes(got.data) == content(2)
    assert silent.delivered.empty(), "the late answer met nobody"


def test_a_cancelled_question_is_answered_by_nobody(encoder: ScriptedEncoder, client: RowsClient) -> None:
    cancelled, kept = Answers(), Answers()
    cancel = client.ask(ref(encoder.address), soon(), cancelled)
    message = encoder.asked()
    cancel()
    encoder.send(Rows(request_id=message.request_id), frame(1))
    client.ask(ref(encoder.address, 2), soon(), kept)
    encoder.send(Rows(request_id=encoder.asked().request_id), frame(2))
    assert isinstance(kept.next(), TensorFrame)
    assert cancelled.delivered.empty()


def test_foreign_answers_are_ignored_and_other_rows_are_a_loss(encoder: ScriptedEncoder, client: RowsClient) -> None:
    answer = Answers()
    client.ask(ref(encoder.address), soon(), answer)
    message = encoder.asked()
    encoder.send(Rows(request_id="of-somebody-else"), frame(7))
    encoder.send(EncodeFailure(request_id="of-nobody", code="embedding_lost", message="foreign", status=503))
    encoder.send(Rows(request_id=message.request_id), TensorFrame("float32", (WIDTH, NUM_ROWS), content(1)))
    assert "other rows" in answer.loss()


def test_a_message_nobody_understands_is_a_loss(encoder: ScriptedEncoder, client: RowsClient) -> None:
    answer = Answers()
    client.ask(ref(encoder.address), soon(), answer)
    encoder.asked()
    encoder.socket.send_multipart([encoder.peer, b"\x93what"])
    assert "malformed" in answer.loss()
    client.ask(ref(encoder.address), soon(), answer)
    encoder.send(Rows(request_id=encoder.asked().request_id), frame(1))
    assert isinstance(answer.next(), TensorFrame), "the next question opens another connection"


def test_a_farewell_is_answered(encoder: ScriptedEncoder, client: RowsClient) -> None:
    answer = Answers()
    client.ask(ref(encoder.address), soon(), answer)
    encoder.send(Rows(request_id=encoder.asked().request_id), frame(1))
    encoder.send(Farewell(sequence=3))
    assert encoder.receive() == Goodbye(sequence=3)


def test_closing_ends_the_thread_and_what_was_asked(encoder: ScriptedEncoder) -> None:
    num_threads = threading.active_count()
    client = RowsClient()
    answer = Answers()
    client.ask(ref(encoder.address), soon(), answer)
    encoder.asked()
    client.close()
    client.close()
    assert "not asked any more" in answer.loss()
    assert threading.active_count() == num_threads
    with pytest.raises(ValueError, match="closed"):
        client.ask(ref(encoder.address), soon(), answer)
