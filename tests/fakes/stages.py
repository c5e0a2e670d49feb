"""Stages at the level of their messages: workers over the memory transport, an encoder and a fetcher that only pretend.

A worker answers what `answer` says, token by token, and can be told to die, stall or refuse at a given point.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from encoder.errors import EmbeddingUnknown, EncoderError, EncoderUnavailable
from encoder.types import EmbeddingRef, EncodeReply, EncoderInfo, StageTimings
from encoder.wire import TensorFrame
from epd.transport.base import Peer, PeerUnreachable
from epd.transport.memory import MemoryEndpoint, MemoryNetwork
from epd.types import (
    Abort,
    ExpectKv,
    Finish,
    FinishReason,
    FromWorker,
    GenerateRequest,
    Hello,
    KvTransfer,
    Role,
    Submit,
    TokenDelta,
    TokenLogprob,
    Usage,
    WorkerInfo,
)
from preprocess.errors import MediaError, MediaUnreachable
from preprocess.types import MediaKey, MediaLayout, MediaOptions, MediaSource, Modality

Answer = Callable[[GenerateRequest], Sequence[int]]
CONTEXT_TOKENS = 4096
_POLL_S = 0.001
_incarnations = itertools.count()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that other tasks of this loop bring about."""
    for _ in range(round(timeout_s / _POLL_S)):
        if condition():
            return
        await asyncio.sleep(_POLL_S)
    raise AssertionError(f"not within {timeout_s} s")


@dataclass
class FakeWorker:
    """One engine process. `answer` gives the whole answer without its stop token; `max_tokens` cuts it."""

    network: MemoryNetwork
    address: str
    answer: Answer
    role: Role = Role.BOTH
    ready: bool = True
    die_after: int | None = None
    """Tokens to send before the process is gone, once."""
    stall_after: int | None = None
    """Tokens to send before the worker says nothing more, though it lives."""
    finish: Finish | None = None
    """A Finish to give instead of an answer (its request_id is replaced)."""
    step_s: float = 0.0
    """How long a request waits, and how long its prompt takes."""
    mute: bool = False
    """Does not answer heartbeats."""
    kv_fingerprint: str = ""
    aborted: list[str] = field(default_factory=list)
    submitted: list[GenerateRequest] = field(default_factory=list)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _expected: dict[str, tuple[Peer, GenerateRequest]] = field(default_factory=dict)
    _endpoint: MemoryEndpoint | None = None
    _loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "FakeWorker":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.die()

    def start(self) -> None:
        """A fresh process at the same address."""
        self.incarnation = f"incarnation-{next(_incarnations)}"
        self._endpoint = self.network.endpoint(self.address)
        self._loop = asyncio.create_task(self._serve(self._endpoint))

    def die(self) -> None:
        """SIGKILL: nothing more is said, the connection breaks."""
        for task in [*self._running.values(), *([self._loop] if self._loop else [])]:
            if task is not asyncio.current_task():
                task.cancel()
        self._running.clear()
        self._expected.clear()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def say(self, peer: Peer, message: FromWorker) -> None:
        if self._endpoint is not None:
            with contextlib.suppress(PeerUnreachable):
                self._endpoint.send(peer, message)

    async def _serve(self, endpoint: MemoryEndpoint) -> None:
        while self._endpoint is endpoint:
            for received in endpoint.receive(0):
                match received.message:
                    case Hello(sequence=sequence):
                        if not self.mute:
                            self.say(received.peer, self._info(sequence))
                    case Submit() as submit:
                        self.submitted.append(submit.request)
                        self._begin(submit.request, received.peer, submit.decode_address)
                    case ExpectKv(request=request):
                        self.submitted.append(request)
                        self._expected[request.request_id] = (received.peer, request)
                    case KvTransfer(request_id=request_id):
                        if request_id in self._expected:
                            peer, request = self._expected.pop(request_id)
                            self._begin(request, peer, None, first=1)
                    case Abort(request_id=request_id):
                        self.aborted.append(request_id)
                        self._expected.pop(request_id, None)
                        if (task := self._running.pop(request_id, None)) is not None:
                            task.cancel()
            await asyncio.sleep(_POLL_S)

    def _begin(self, request: GenerateRequest, peer: Peer, decode_address: str | None, first: int = 0) -> None:
        task = asyncio.create_task(self._run(request, peer, decode_address, first))
        self._running[request.request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request.request_id, None))

    async def _run(self, request: GenerateRequest, peer: Peer, decode_address: str | None, first: int) -> None:
        """Tokens from `first` of this attempt on; a prefill worker says the first one and hands over."""
        if self.step_s:
            await asyncio.sleep(2 * self.step_s)
        if self.finish is not None:
            self.say(peer, _replace_id(self.finish, request.request_id))
            return
        whole = list(self.answer(request))
        stop_ids = request.sampling.stop_token_ids
        stop_at = next((at for at, token_id in enumerate(whole) if token_id in stop_ids), len(whole))
        stop_token_id = whole[stop_at] if stop_at < len(whole) else None
        del whole[stop_at:]
        num_emitted = request.num_emitted
        limit = request.sampling.max_tokens
        todo = whole[num_emitted:limit]
        begun_s = time.monotonic()
        for i, token_id in enumerate(todo):
            if i < first:
                continue
            if await self._fault_at(i):
                return
            logprobs = ()
            if request.sampling.top_logprobs is not None:
                top = ((token_id, -0.5),) * min(1, request.sampling.top_logprobs)
                logprobs = (TokenLogprob(token_id=token_id, logprob=-0.5, top=top),)
            self.say(
                peer,
                TokenDelta(
                    request_id=request.request_id,
                    index=num_emitted + i,
                    token_ids=(token_id,),
                    logprobs=logprobs,
                    usage=_usage(request, i + 1) if i == first else None,
                    timings=self._timings(first, begun_s) if i == first else {},
                ),
            )
            await asyncio.sleep(0)
            if decode_address is not None:
                self._hand_over(request, token_id, decode_address)
                return
        if await self._fault_at(len(todo)):
            return
        stopped = len(whole) < limit
        finish = Finish(
            request_id=request.request_id,
            reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            usage=_usage(request, len(todo) + stopped),
            stop_token_id=stop_token_id if stopped else None,
            timings=self._timings(first, begun_s),
        )
        self.say(peer, finish)

    def _timings(self, first: int, begun_s: float) -> dict[str, float]:
        """`step_s` of each kind; a worker that begins after the first token was handed the prompt's KV."""
        decoded_s = {"decode_s": time.monotonic() - begun_s}
        timings = {"queue_s": self.step_s, "prefill_s": self.step_s, "first_token_s": 2 * self.step_s}
        if first:
            return {**timings, "transfer_s": self.step_s, "decode_queue_s": self.step_s, **decoded_s}
        return {**timings, **decoded_s}

    async def _fault_at(self, num_sent: int) -> bool:
        if self.stall_after is not None and num_sent >= self.stall_after:
            await asyncio.sleep(3600)
        if self.die_after is not None and num_sent >= self.die_after:
            self.die_after = None
            self.die()
            return True
        return False

    def _hand_over(self, request: GenerateRequest, token_id: int, address: str) -> None:
        transfer = KvTransfer(
            request_id=request.request_id,
            incarnation="",
            num_tokens=len(request.token_ids),
            first_token=token_id,
            page_size=16,
            num_full_layers=1,
            num_window_layers=1,
            first_full_page=0,
            num_full_pages=1,
            first_window_page=0,
            num_window_pages=1,
            cached_tokens=0,
            healed_tokens=0,
            layout_fingerprint="",
        )
        if self._endpoint is not None:
            with contextlib.suppress(PeerUnreachable):
                self._endpoint.send_to(address, transfer)

    def _info(self, sequence: int) -> WorkerInfo:
        return WorkerInfo(
            sequence=sequence,
            worker=self.address,
            incarnation=self.incarnation,
            role=self.role,
            address=self.address,
            model="tiny",
            max_context_tokens=CONTEXT_TOKENS,
            eos_token_ids=(),
            num_waiting=0,
            num_running=self.num_running,
            full_pages_free=10,
            full_pages_total=20,
            window_pages_free=5,
            window_pages_total=8,
            ready=self.ready,
            kv_fingerprint=self.kv_fingerprint,
            counters={"steps_total": 7.0},
        )


def _usage(request: GenerateRequest, num_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=len(request.token_ids),
        completion_tokens=num_tokens,
        cached_tokens=3,
        healed_tokens=2,
        host_tokens=1,
        store_tokens=1,
    )


def _replace_id(finish: Finish, request_id: str) -> Finish:
    return Finish(
        request_id=request_id,
        reason=finish.reason,
        usage=finish.usage,
        status=finish.status,
        code=finish.code,
        message=finish.message,
        retryable=finish.retryable,
    )


LAYOUTS = {
    Modality.IMAGE: MediaLayout(Modality.IMAGE, grid_thw=(1, 6, 6)),
    Modality.VIDEO: MediaLayout(Modality.VIDEO, grid_thw=(2, 4, 4), timestamps_s=(0.0, 2.0)),
    Modality.AUDIO: MediaLayout(Modality.AUDIO, num_audio_rows=5),
}


@dataclass
class FakeEncoder:
    """Layouts by modality, leases counted; `errors` maps content to what its encoding raises, `warnings` to its own."""

    errors: dict[bytes, MediaError | EncoderError] = field(default_factory=dict)
    warnings: dict[bytes, tuple[str, ...]] = field(default_factory=dict)
    up: bool = True
    release_error: Exception | None = None
    encoded: list[bytes] = field(default_factory=list)
    kept: dict[MediaKey, Modality] = field(default_factory=dict)
    """Embeddings by key, as in an arena; what is not there cannot be had without content."""
    asked: list[tuple[bytes, Modality, MediaOptions]] = field(default_factory=list)
    asked_by_key: list[MediaKey] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    async def encode(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> EncodeReply:
        await until(lambda: self.up)
        if content is None:
            self.asked_by_key.append(key)
            if key not in self.kept:
                raise EmbeddingUnknown(f"no embedding is kept under the key {key}")
            modality, content = self.kept[key], b""
        elif content in self.errors:
            raise self.errors[content]
        else:
            self.encoded.append(content)
            self.asked.append((content, modality, options))
        is_cached, self.kept[key] = key in self.kept, modality
        layout = LAYOUTS[modality]
        lease_id = f"lease-{next(self._ids)}"
        self.leases.add(lease_id)
        ref = EmbeddingRef(
            key=key,
            arena="arena",
            offset_bytes=0,
            num_rows=layout.num_rows,
            width=8,
            dtype="float32",
            checksum=0,
            lease_id=lease_id,
        )
        return EncodeReply(
            request_id="r",
            key=key,
            layout=layout,
            ref=ref,
            cached=is_cached,
            timings=StageTimings(),
            warnings=self.warnings.get(content, ()),
        )

    async def encode_inline(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> tuple[EncodeReply, TensorFrame]:
        """Rows of zeros."""
        reply = await self.encode(content, modality, options, key, deadline_unix_s)
        shape = (reply.ref.num_rows, reply.ref.width)
        return reply, TensorFrame("float32", shape, bytes(reply.ref.size_bytes))

    def release(self, ref: EmbeddingRef) -> None:
        if self.release_error is not None:
            raise self.release_error
        self.leases.discard(ref.lease_id)
        self.released.append(ref.lease_id)

    async def info(self, timeout_s: float = 60.0) -> EncoderInfo:
        if not self.up:
            await asyncio.sleep(timeout_s)
        if not self.up:
            raise EncoderUnavailable("no encoder is up", retry_after_s=1.0)
        return _encoder_info()

    def why_not_up(self) -> dict[str, str | None]:
        return {name: None if info is not None and info.ready else "not up" for name, info in self.infos().items()}

    def infos(self) -> dict[str, EncoderInfo | None]:
        """Two replicas of one host, which share an arena."""
        info = _encoder_info() if self.up else None
        return {"memory://encoder": info, "memory://encoder-1": info}


def _encoder_info() -> EncoderInfo:
    return EncoderInfo(
        sequence=1,
        replica="encoder-0",
        incarnation="e",
        fingerprint="f" * 32,
        width=8,
        dtype="float32",
        modalities=tuple(Modality),
        num_pending=0,
        num_cached=2,
        cached_bytes=64,
        capacity_bytes=1024,
        leased_bytes=32,
        ready=True,
        counters={"hits_total": 4.0},
        page_bytes=64,
        arena="arena",
    )


@dataclass
class FakeFetcher:
    """Content by URL; anything else cannot be reached."""

    contents: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    askers: list[Hashable | None] = field(default_factory=list)

    async def fetch(self, source: MediaSource, *, asker: Hashable | None = None) -> bytes:
        self.fetched.append(source.url)
        self.askers.append(asker)
        await asyncio.sleep(0)
        if source.url not in self.contents:
            raise MediaUnreachable(f"{source.url[:60]} cannot be reached")
        return self.contents[source.url]
