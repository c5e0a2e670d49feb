"""The caller's side of the encoder stage: route by key, send, retries on other replicas; and reading embeddings.

Loads no torch: `ArenaReader.tensor` imports it when it is called, everything else works on buffers.
"""

import asyncio
import logging
import math
import mmap
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq.asyncio
from numpy.typing import NDArray

from encoder.cache.arena import attach, checksum
from encoder.cluster import ClusterKeys
from encoder.errors import (
    ArenaLocked,
    EmbeddingLost,
    EmbeddingUnknown,
    EncodeCancelled,
    EncoderBusy,
    EncoderError,
    EncoderUnavailable,
    KeyMismatch,
    ReplicaLost,
    TowerFailed,
)
from encoder.links import Handler, Link, MemoryLink, ZmqLink
from encoder.remote import Answer, Remote
from encoder.ring import Ring
from encoder.tracing import Span, span
from encoder.types import EmbeddingRef, EncodeReply, EncodeRequest, EncoderInfo
from encoder.wire import TensorFrame
from preprocess.types import MediaKey, MediaOptions, Modality

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Another replica may do better where one failed like this; any other failure is the medium's own.
RETRYABLE = (ReplicaLost, EncodeCancelled, EncoderUnavailable, EncoderBusy, KeyMismatch, TowerFailed)
# The replica is gone or about to go, or took us for gone. If there is no other, the next one to come up is waited for.
GOING = (ReplicaLost, EncodeCancelled, EncoderUnavailable)
# One retry where the replica lives. A replica may be lost by chance twice in a row, while all are restarted one by one;
# but a medium that took this many with it is not given to yet another.
MAX_REFUSED = 2
MAX_LOST = 3


class EncoderClient:
    """Sends media to the replica that owns their key. Use as `async with`; all methods on one loop."""

    def __init__(
        self,
        links: Sequence[Link],
        *,
        ping_period_s: float = 1.0,
        silence_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A replica that answers no ping for `silence_timeout_s` has lost what it owes and is not up until it speaks.

        From half of that on it is passed over, like one whose tower is stuck.
        """
        self._context: zmq.asyncio.Context | None = None
        self._keys: ClusterKeys | None = None
        self._ping_period_s = ping_period_s
        self._clock = clock
        self._changed = asyncio.Event()
        self._max_unanswered = math.ceil(silence_timeout_s / ping_period_s)
        self._replicas = {link.name: self._remote(link) for link in links}
        self._ring = Ring([link.name for link in links])
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @classmethod
    def connect(cls, addresses: Sequence[str], *, keys: ClusterKeys | None = None) -> "EncoderClient":
        """A client of replicas at ZMQ addresses, to which others may be added."""
        context = zmq.asyncio.Context()
        client = cls([ZmqLink(address, context, keys=keys) for address in addresses])
        client._context, client._keys = context, keys
        return client

    @classmethod
    def embedded(cls, server: Handler, name: str = "encoder") -> "EncoderClient":
        """A client of a server on the same loop: no sockets, the same behaviour."""
        return cls([MemoryLink(name, server)])

    async def __aenter__(self) -> "EncoderClient":
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def start(self) -> None:
        """Open the links, inside a running loop."""
        self._begin("", self._ping())
        for replica in self._replicas.values():
            self._open(replica)

    def add(self, where: str | Link) -> None:
        """A replica joins the ring, by address where the client was made by `connect`; one that was retired is back."""
        name = where if isinstance(where, str) else where.name
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = self._remote(self._link(where) if isinstance(where, str) else where)
            if self._tasks:
                self._open(replica)
        replica.is_retired = False
        self._turn_ring()

    def retire(self, address: str) -> None:
        """The replica leaves the ring: it is asked nothing more, and forgotten once it owes nothing."""
        if address in self._replicas:
            self._replicas[address].is_retired = True
            self._turn_ring()

    async def close(self) -> None:
        """Close the links; calls that wait end with EncoderUnavailable."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for replica in self._replicas.values():
            replica.link.on_change = None
            replica.link.close()
            replica.lose("is no longer used: the client was closed")
        if self._context is not None:
            self._context.destroy(linger=0)

    async def info(self, timeout_s: float = 60.0) -> EncoderInfo:
        """Identity of a replica that is up (all run the same weights). Raises EncoderUnavailable after `timeout_s`."""
        await self._wait_until_up(self._clock() + timeout_s)
        return next(r.info for r in self._listed() if r.is_up and r.info is not None)

    def infos(self) -> dict[str, EncoderInfo | None]:
        """The last word of every replica by address; None for those that are not up."""
        return {replica.name: replica.info if replica.is_up else None for replica in self._listed()}

    def why_not_up(self) -> dict[str, str | None]:
        """Reasons for people by address; None for a replica that is up."""
        return {replica.name: replica.why_not_up for replica in self._listed()}

    async def encode(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> EncodeReply:
        """Rows of one medium, leased until the deadline or `release`.

        Without content the key alone is known: raises EmbeddingUnknown when no arena and no second tier has it.
        Raises what the encoder raised (MediaError, EncoderError), EncodeDeadline, or EncoderUnavailable after the
        retry.
        """
        reply, _ = await self._encode(content, modality, options, key, deadline_unix_s, inline=False)
        return reply

    async def encode_inline(
        self, content: bytes | None, modality: Modality, options: MediaOptions, key: MediaKey, deadline_unix_s: float
    ) -> tuple[EncodeReply, TensorFrame]:
        """`encode` with the rows themselves, for a caller that cannot map the arena."""
        reply, tensors = await self._encode(content, modality, options, key, deadline_unix_s, inline=True)
        return reply, tensors[0]

    def loads(self) -> dict[str, int]:
        """Requests that every replica owes an answer, by address."""
        return {name: replica.load for name, replica in self._replicas.items()}

    @property
    def num_held(self) -> int:
        """Leases that were given and not given back."""
        return sum(replica.num_held for replica in self._replicas.values())

    def release(self, ref: EmbeddingRef) -> None:
        """End the lease of a reference; harmless when it has ended.

        Who gave it is told, or any replica that shares its arena.
        """
        replicas = sorted(self._replicas.values(), key=lambda replica: not replica.holds(ref.lease_id))
        for replica in replicas:
            is_there = replica.info is not None and replica.info.arena == ref.arena
            if (is_there or replica.holds(ref.lease_id)) and replica.release(ref.lease_id):
                return

    async def _encode(
        self,
        content: bytes | None,
        modality: Modality,
        options: MediaOptions,
        key: MediaKey,
        deadline_unix_s: float,
        *,
        inline: bool,
    ) -> Answer:
        attributes = {"mimo.media.modality": modality.value, "mimo.media.key": key}
        with span("mimo.encode", kind="client", attributes=attributes) as traced:
            # Ids of its own for every attempt: a late reply to the first never meets the second.
            request = EncodeRequest(
                request_id="",
                key=key,
                modality=modality,
                options=options,
                deadline_unix_s=deadline_unix_s,
                inline=inline,
                key_only=content is None,
                traceparent=traced.carrier.traceparent,
                tracestate=traced.carrier.tracestate,
            )
            reply, tensors = await self._try_replicas(request, content, traced)
            traced.set({"mimo.media.cached": reply.cached, "mimo.media.tokens": reply.ref.num_rows})
            return reply, tensors

    async def _try_replicas(self, prototype: EncodeRequest, content: bytes | None, traced: Span) -> Answer:
        key, deadline_unix_s = prototype.key, prototype.deadline_unix_s
        failed: set[str] = set()
        last_error: EncoderError | None = None
        num_lost = num_refused = 0
        while num_lost < MAX_LOST and num_refused < MAX_REFUSED:
            replica = await self._pick(key, failed, last_error, deadline_unix_s)
            request = msgspec.structs.replace(prototype, request_id=uuid.uuid4().hex)
            try:
                return await replica.ask(request, content)
            except RETRYABLE as error:
                logger.info("encoder %s did not serve %s: %s", replica.name, key, error)
                traced.event("mimo.retry", {"mimo.encode.replica": replica.name, "error.type": error.code})
                failed |= self._sharing(replica) if isinstance(error, ArenaLocked) else {replica.name}
                last_error = error
                num_lost += isinstance(error, (ReplicaLost, EncodeCancelled))
                num_refused += not isinstance(error, GOING)
            except EmbeddingUnknown as error:
                # Another host's arena may have it: a key moves when its replica was down for a while.
                failed |= self._sharing(replica)
                last_error = error
        assert last_error is not None
        raise last_error

    async def _pick(
        self, key: MediaKey, failed: set[str], last_error: EncoderError | None, deadline_unix_s: float
    ) -> Remote:
        """The replica to try. After a failure another one; the same one only if it was lost and no other is up."""
        while True:
            up = {name: replica.load for name, replica in self._replicas.items() if replica.is_up}
            sound = {name: load for name, load in up.items() if self._replicas[name].is_sound}
            excluded = frozenset(failed)
            name = self._ring.choose(key, sound, excluded) or self._ring.choose(key, up, excluded)
            if name is None and isinstance(last_error, GOING):
                name = self._ring.choose(key, sound) or self._ring.choose(key, up)
            if name is not None:
                return self._replicas[name]
            if last_error is not None and not isinstance(last_error, GOING):
                raise last_error
            await self._wait_until_up(deadline_unix_s)

    def _sharing(self, replica: Remote) -> set[str]:
        """The replicas that use the same arena, and wait for the same lock."""
        arena = None if replica.info is None else replica.info.arena
        infos = {name: other.info for name, other in self._replicas.items()}
        return {replica.name, *(name for name, info in infos.items() if info is not None and info.arena == arena)}

    async def _wait_until_up(self, deadline_unix_s: float) -> None:
        while not any(replica.is_up for replica in self._listed()):
            if self._closed:
                raise EncoderUnavailable("the encoder client was closed")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline_unix_s - self._clock()))
            except TimeoutError as error:
                raise EncoderUnavailable("no encoder is up", retry_after_s=1.0) from error

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._ping_period_s)
            for replica in list(self._replicas.values()):
                if replica.is_retired and (not replica.link.connected or not (replica.load or replica.num_held)):
                    self._forget(replica)
                else:
                    replica.ping()

    def _link(self, address: str) -> Link:
        assert self._context is not None, "there are no addresses among links that were handed in"
        return ZmqLink(address, self._context, keys=self._keys)

    def _remote(self, link: Link) -> Remote:
        return Remote(link, self._changed.set, max_unanswered=self._max_unanswered, clock=self._clock)

    def _listed(self) -> list[Remote]:
        return [replica for replica in self._replicas.values() if not replica.is_retired]

    def _turn_ring(self) -> None:
        self._ring = Ring([replica.name for replica in self._listed()])
        self._changed.set()

    def _open(self, replica: Remote) -> None:
        replica.link.open()
        self._begin(replica.name, replica.follow())

    def _forget(self, replica: Remote) -> None:
        del self._replicas[replica.name]
        self._tasks.pop(replica.name).cancel()
        replica.link.on_change = None
        replica.link.close()
        replica.lose("is no longer listed")

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work)
        task.add_done_callback(_report)


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("a task of the encoder client ended", exc_info=task.exception())


class ArenaReader:
    """Maps embeddings of encoders on this host by reference, without a copy.

    `content` and `array` alias shared memory that the reference's lease keeps: use them before the lease is released.
    `tensor` is a copy, verified as such, so it is right or EmbeddingLost with or without a lease.
    """

    def __init__(self, max_mapped: int = 16) -> None:
        self._mapped: dict[str, mmap.mmap] = {}
        self._max_mapped = max_mapped

    def content(self, ref: EmbeddingRef) -> memoryview:
        """The bytes of the rows, checksum verified. Raises EmbeddingLost."""
        content = self._shared(ref)
        _verify(content, ref)
        return content

    def array(self, ref: EmbeddingRef) -> NDArray[Any]:
        """`[num_rows, width]`; bfloat16, which numpy lacks, as the uint16 of its bits. Raises EmbeddingLost."""
        dtype = np.dtype("uint16" if ref.dtype == "bfloat16" else ref.dtype)
        return np.frombuffer(self.content(ref), dtype=dtype).reshape(ref.num_rows, ref.width)

    def tensor(self, ref: EmbeddingRef) -> "torch.Tensor":
        """`[num_rows, width]` on the CPU in the reference's dtype, a copy. Raises EmbeddingLost."""
        return verified_copy(self._shared(ref), ref)

    def _shared(self, ref: EmbeddingRef) -> memoryview:
        segment = self._segment(ref.arena)
        if ref.offset_bytes < 0 or ref.offset_bytes + ref.size_bytes > len(segment):
            raise EmbeddingLost(f"{ref.key} lies outside the arena {ref.arena}")
        return memoryview(segment)[ref.offset_bytes : ref.offset_bytes + ref.size_bytes]

    def _segment(self, name: str) -> mmap.mmap:
        found = self._mapped.pop(name, None)
        if found is None:
            try:
                found = attach(name)
            except (OSError, ValueError) as error:
                raise EmbeddingLost(f"the arena {name} is gone: its encoder has stopped") from error
        # Young end last; a mapping that falls out stays valid for who still holds a view into it.
        self._mapped[name] = found
        while len(self._mapped) > self._max_mapped:
            del self._mapped[next(iter(self._mapped))]
        return found


def verified_copy(content: memoryview, ref: EmbeddingRef) -> "torch.Tensor":
    """The rows in memory of their own, `[num_rows, width]` in the reference's dtype. Raises EmbeddingLost.

    First copied, then verified: a sequence computed again after its first token has no lease any more, and the encoder
    may be writing over these rows. Numpy copies without the interpreter lock; `bytearray` would hold it.
    """
    import torch

    copied = np.empty(ref.size_bytes, np.uint8)
    np.copyto(copied, np.frombuffer(content, np.uint8))
    _verify(copied.data, ref)
    return torch.from_numpy(copied).view(getattr(torch, ref.dtype)).view(ref.num_rows, ref.width)


def _verify(content: memoryview | bytearray, ref: EmbeddingRef) -> None:
    if checksum(content) != ref.checksum:
        raise EmbeddingLost(f"the bytes of {ref.key} are not the ones the reference names")
