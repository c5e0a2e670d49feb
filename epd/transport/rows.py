"""Embedding rows of encoders on other hosts: asked for by reference, received as raw frames, on a thread of its own.

    ask --> connected? --no--> wait for it, or lost --> FetchRows --> Rows + frame --> checksum --> deliver
                                                                  '--> EncodeFailure, deadline, broken connection: lost

Each encoder has one DEALER. An encoder that cannot be reached costs its own questions, and at once: a connection that
breaks or is refused ends everything that was asked over it.
"""

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from encoder.cluster import ClusterKeys, limit, secure_client
from encoder.errors import EmbeddingLost, WireError
from encoder.types import EmbeddingRef, EncodeFailure, Farewell, FetchRows, FromEncoder, Goodbye, Rows, ToEncoder
from encoder.wire import Codec, TensorFrame

logger = logging.getLogger(__name__)

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
# A peer that announces a larger frame is disconnected before the memory is taken.
_MAX_FRAME_BYTES = 4 << 30
_IDLE_POLL_S = 3600.0
_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Deliver = Callable[[TensorFrame | EmbeddingLost], None]


@dataclass(slots=True, eq=False)
class _Question:
    """`message_id` is its own: a late answer to an earlier question meets nobody."""

    ref: EmbeddingRef
    deadline_unix_s: float
    deliver: Deliver
    message_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Encoder:
    """One connection. Questions are sent once it is up."""

    address: str
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    is_connected: bool = False
    asked: dict[str, _Question] = field(default_factory=dict)


class RowsClient:
    """`ask`, what it returns, and `close` may be called from any thread. The thread starts with the first question."""

    def __init__(self, *, keys: ClusterKeys | None = None, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds, the time base of deadlines."""
        self._keys = keys
        self._clock = clock
        self._inbox: deque[_Question] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def ask(self, ref: EmbeddingRef, deadline_unix_s: float, deliver: Deliver) -> Callable[[], None]:
        """Ask the encoder at `ref.source`; never waits.

        `deliver` is called once, on the client's thread, with a frame `[num_rows, width]` whose bytes are the ones the
        reference names, or with why there are none. What is returned cancels: `deliver` may then stay uncalled.
        """
        question = _Question(ref, deadline_unix_s, deliver)
        with self._lock:
            if self._is_closed:
                raise ValueError("the client is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embedding frames", daemon=True)
                self._thread.start()
        self._inbox.append(question)
        self._wake()

        def cancel() -> None:
            question.is_cancelled = True
            self._wake()

        return cancel

    def close(self) -> None:
        """End the thread; what was asked is not answered any more. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        # A full pipe means that a wake is pending, a closed one that nobody waits any more.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def _run(self) -> None:
        conversation = _Conversation(self._clock, self._keys)
        try:
            while not self._is_closed:
                while self._inbox:
                    conversation.ask(self._inbox.popleft())
                try:
                    conversation.step(self._wake_read)
                except Exception:  # outermost loop of the thread: nobody must wait for ever
                    logger.exception("receiving embeddings failed")
                    conversation.drop_all("could not be understood; the worker's log says why")
        finally:
            conversation.close()


class _Conversation:
    """The thread's own: sockets and what was asked over them."""

    def __init__(self, clock: Callable[[], float], keys: ClusterKeys | None) -> None:
        self._clock = clock
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._codec: Codec[FromEncoder] = Codec(FromEncoder)
        self._out: Codec[ToEncoder] = Codec(ToEncoder)
        self._encoders: dict[str, _Encoder] = {}

    def close(self) -> None:
        self.drop_all("is not asked any more")
        self._context.destroy(linger=0)

    def drop_all(self, reason: str) -> None:
        """Close every connection; what was asked is lost."""
        for encoder in list(self._encoders.values()):
            self._drop(encoder, reason)

    def ask(self, question: _Question) -> None:
        address = question.ref.source
        encoder = self._encoders.get(address)
        if encoder is None:
            try:
                encoder = self._encoders[address] = self._connect(address)
            except zmq.ZMQError as error:
                question.deliver(EmbeddingLost(f"the encoder at {address} cannot be reached: {error}"))
                return
        encoder.asked[question.message_id] = question
        if encoder.is_connected:
            self._send(encoder, question)

    def step(self, wake: int) -> None:
        """Wait for the next event or deadline, and take in what there is."""
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        for encoder in self._encoders.values():
            poller.register(encoder.socket, zmq.POLLIN)
            poller.register(encoder.monitor, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(1000 * self._wait_s())))
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        for encoder in list(self._encoders.values()):
            # Answers first: they may have come in just before the connection broke.
            if encoder.socket in ready:
                self._read(encoder)
            if encoder.monitor in ready and self._encoders.get(encoder.address) is encoder:
                self._follow(encoder)
        self._end_overdue()

    def _wait_s(self) -> float:
        asked = [question for encoder in self._encoders.values() for question in encoder.asked.values()]
        next_s = min((question.deadline_unix_s for question in asked), default=None)
        return _IDLE_POLL_S if next_s is None else min(_IDLE_POLL_S, max(0.0, next_s - self._clock()))

    def _connect(self, address: str) -> _Encoder:
        socket = self._context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(_CONNECTED | _BROKEN)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.ROUTING_ID, b"r" + uuid.uuid4().bytes)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            limit(socket, max_frame_bytes=_MAX_FRAME_BYTES)
            secure_client(socket, address, self._keys)
            socket.connect(address)
        except zmq.ZMQError:
            _close(socket, monitor)
            raise
        return _Encoder(address, socket, monitor)

    def _send(self, encoder: _Encoder, question: _Question) -> None:
        ref = question.ref
        asked = FetchRows(request_id=question.message_id, key=ref.key, checksum=ref.checksum)
        self._say(encoder, asked)

    def _say(self, encoder: _Encoder, message: ToEncoder) -> None:
        # What cannot be sent now was meant for a connection that is breaking; the monitor says so in a moment.
        with contextlib.suppress(zmq.Again):
            encoder.socket.send_multipart(self._out.encode(message), zmq.DONTWAIT)

    def _follow(self, encoder: _Encoder) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(encoder.monitor.recv_multipart(zmq.DONTWAIT))["event"]
                if event & _BROKEN:
                    self._drop(encoder, "cannot be reached" if not encoder.is_connected else "closed the connection")
                    return
                encoder.is_connected = True
                for question in encoder.asked.values():
                    self._send(encoder, question)

    def _read(self, encoder: _Encoder) -> None:
        # One message a turn: frames are large, and deadlines and other encoders want their turn.
        with contextlib.suppress(zmq.Again):
            frames = encoder.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            try:
                message, tensors = self._codec.decode([frame.buffer for frame in frames])
            except WireError as error:
                # Whose answer it was cannot be told.
                self._drop(encoder, f"sent a malformed message ({error})")
                return
            match message:
                case Rows(request_id=message_id):
                    self._answer(encoder, message_id, tensors)
                case EncodeFailure(request_id=message_id):
                    question = encoder.asked.pop(message_id, None)
                    if question is not None:
                        question.deliver(EmbeddingLost(message.message))
                case Farewell(sequence=sequence):
                    self._say(encoder, Goodbye(sequence=sequence))

    def _answer(self, encoder: _Encoder, message_id: str, tensors: list[TensorFrame]) -> None:
        question = encoder.asked.pop(message_id, None)
        if question is None or question.is_cancelled:
            return
        ref = question.ref
        if [(frame.dtype, frame.shape) for frame in tensors] != [(ref.dtype, (ref.num_rows, ref.width))]:
            question.deliver(EmbeddingLost(f"the encoder at {encoder.address} sent other rows than those of {ref.key}"))
        else:
            question.deliver(tensors[0])

    def _end_overdue(self) -> None:
        now_s = self._clock()
        for encoder in self._encoders.values():
            for question in list(encoder.asked.values()):
                if question.is_cancelled:
                    del encoder.asked[question.message_id]
                elif question.deadline_unix_s <= now_s:
                    del encoder.asked[question.message_id]
                    late = f"the rows of {question.ref.key} did not come from {encoder.address} in time"
                    question.deliver(EmbeddingLost(late))

    def _drop(self, encoder: _Encoder, reason: str) -> None:
        """Close the connection and end what was asked over it; the next question opens another."""
        del self._encoders[encoder.address]
        _close(encoder.socket, encoder.monitor)
        questions = [question for question in encoder.asked.values() if not question.is_cancelled]
        if questions:
            logger.warning("the encoder at %s %s; %d embeddings are lost", encoder.address, reason, len(questions))
        for question in questions:
            question.deliver(EmbeddingLost(f"the encoder at {encoder.address} {reason}"))


def _close(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    socket.disable_monitor()
    socket.close(0)
    monitor.close(0)
