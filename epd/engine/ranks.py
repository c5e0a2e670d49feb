"""Embedding rows under tensor parallelism: every rank fetches its own, all agree on which requests can run.

The engine of this repository runs on one rank (TP = 1) and uses `EmbeddingFeed` directly. This is the contract for
more, and it is tested with processes over gloo: a `RankFeed` stands before the feed of each rank, is a `RowSupply` for
rank 0's scheduler, and tells the other ranks, which run what rank 0 plans, the same at the same step.

    rank 0:  want, forget --> control stream --broadcast--> every rank: its own feed fetches, by reference or as frames
    each step, every rank: `collect` --> states of its requests --minimum over ranks--> the same Arrivals everywhere

                here on all ranks -> ready          under way somewhere -> nothing yet          lost somewhere -> lost

One `collect` per step on every rank, in step with the forward's own collectives. What it exchanges is two small
messages of fixed size that are begun in one step and taken in at the next one: they travel beside the forward, and a
rank whose rows are late delays the requests that need them and nothing else. While anything is under way the ranks must
go on stepping. Each rank reads the same stream, so slots, order and verdicts are the same everywhere.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from encoder.errors import EmbeddingLost
from encoder.types import EmbeddingRef
from epd.engine.feed import Arrivals, EmbeddingFeed

logger = logging.getLogger(__name__)

# Requests the ranks can agree about in one step, a byte each; those beyond wait for a slot.
_NUM_SLOTS = 256
# The part of the control stream that one step carries; longer messages take several steps.
_BEAT_BYTES = 8192
_SIZE_BYTES = 4

# What the minimum is taken over.
_LOST, _UNDER_WAY, _HERE = 0, 1, 2


class RankLost(Exception):
    """Another rank is gone or stuck: the group can run nothing any more."""


class Pending(Protocol):
    """A collective that was begun."""

    def wait(self) -> None:
        """Until it has ended. Raises RankLost."""
        ...


class RankGroup(Protocol):
    """The ranks, for control messages only: not the group whose collectives the forward uses."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, tensor: Tensor) -> Pending:
        """Begin to overwrite the tensor [n] u8 with rank 0's. It must be left alone until the end."""
        ...

    def minimum(self, tensor: Tensor) -> Pending:
        """Begin to overwrite the tensor [n] u8 with the smallest of all ranks' by element."""
        ...


class GlooGroup:
    """A `torch.distributed` group with the gloo backend."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        """`timeout_s` bounds every wait for the others."""
        self._group = group
        self._timeout_s = timeout_s

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def broadcast(self, tensor: Tensor) -> Pending:
        return _GlooPending(dist.broadcast(tensor, 0, group=self._group, async_op=True), self._timeout_s)

    def minimum(self, tensor: Tensor) -> Pending:
        return _GlooPending(dist.all_reduce(tensor, dist.ReduceOp.MIN, self._group, async_op=True), self._timeout_s)


class _GlooPending:
    def __init__(self, work: dist.Work | None, timeout_s: float) -> None:
        assert work is not None, "this process is no member of the group"
        self._work = work
        self._timeout_s = timeout_s

    def wait(self) -> None:
        try:
            self._work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RankLost(f"the ranks cannot agree any more: {error}") from error


class _Want(msgspec.Struct, frozen=True, tag="want"):
    request_id: str
    version: int
    refs: tuple[EmbeddingRef, ...]
    deadline_unix_s: float


class _Forget(msgspec.Struct, frozen=True, tag="forget"):
    request_id: str


@dataclass(frozen=True, slots=True)
class _Beat:
    """What one step began: the wants its states are about by slot, and the part of the stream it carries."""

    slots: tuple[_Want | None, ...]
    states: Tensor
    control: Tensor
    pending: tuple[Pending, Pending]


@dataclass(slots=True)
class _Asked:
    """Rank 0's view of a request: what its scheduler wants now, and what of that is here on all ranks."""

    version: int = 0
    refs: frozenset[EmbeddingRef] = frozenset()
    agreed: frozenset[EmbeddingRef] = frozenset()


@dataclass(slots=True)
class _Stream:
    """Length-prefixed messages, cut into beats."""

    out: bytearray = field(default_factory=bytearray)
    taken_in: bytearray = field(default_factory=bytearray)

    def say(self, message: _Want | _Forget) -> None:
        encoded = msgspec.msgpack.encode(message)
        self.out += len(encoded).to_bytes(_SIZE_BYTES, "little") + encoded

    def cut(self) -> Tensor:
        """The next part, [_BEAT_BYTES] u8: how much of it counts, then so many bytes."""
        part = self.out[: _BEAT_BYTES - _SIZE_BYTES]
        del self.out[: len(part)]
        beat = torch.zeros(_BEAT_BYTES, dtype=torch.uint8)
        content = torch.frombuffer(bytearray(len(part).to_bytes(_SIZE_BYTES, "little") + part), dtype=torch.uint8)
        beat[: len(content)] = content
        return beat

    def take_in(self, beat: Tensor) -> list[_Want | _Forget]:
        """The messages that are complete with this part."""
        content = beat.numpy().tobytes()
        size = int.from_bytes(content[:_SIZE_BYTES], "little")
        self.taken_in += content[_SIZE_BYTES : _SIZE_BYTES + size]
        messages: list[_Want | _Forget] = []
        while len(self.taken_in) >= _SIZE_BYTES:
            stop = _SIZE_BYTES + int.from_bytes(self.taken_in[:_SIZE_BYTES], "little")
            if len(self.taken_in) < stop:
                break
            messages.append(msgspec.msgpack.decode(self.taken_in[_SIZE_BYTES:stop], type=_Want | _Forget))
            del self.taken_in[:stop]
        return messages


class RankFeed:
    """One rank's `RowSupply`. Only rank 0 wants and forgets; every rank collects, once per step, and reads rows."""

    def __init__(self, feed: EmbeddingFeed, group: RankGroup) -> None:
        self._feed = feed
        self._group = group
        self._stream = _Stream()
        self._beat: _Beat | None = None
        # The same on every rank: what is under way by slot, and what waits for one.
        self._slots: list[_Want | None] = [None] * _NUM_SLOTS
        self._unslotted: dict[str, _Want] = {}
        self._lost_here: dict[str, EmbeddingLost] = {}
        self._asked: dict[str, _Asked] = {}

    @property
    def held_bytes(self) -> int:
        """Of this rank."""
        return self._feed.held_bytes

    def want(self, request_id: str, refs: Sequence[EmbeddingRef], deadline_unix_s: float) -> None:
        """Rank 0: tell every rank, with the next step."""
        if not refs:
            self.forget(request_id)
            return
        asked = self._asked.setdefault(request_id, _Asked())
        if asked.refs == frozenset(refs):
            return
        asked.version += 1
        asked.refs = frozenset(refs)
        # What was wanted without a break is still here everywhere.
        asked.agreed &= asked.refs
        self._say(_Want(request_id, asked.version, tuple(refs), deadline_unix_s))

    def forget(self, request_id: str) -> None:
        if self._asked.pop(request_id, None) is not None:
            self._say(_Forget(request_id))

    def holds(self, request_id: str, refs: Sequence[EmbeddingRef]) -> bool:
        """Rank 0: whether the rows of all these are here on every rank."""
        asked = self._asked.get(request_id)
        return not refs if asked is None else asked.agreed.issuperset(refs)

    def collect(self) -> Arrivals:
        """Take in what the last step began and begin the next exchange. The same on every rank. Raises RankLost."""
        self._lost_here |= dict(self._feed.collect().lost)
        arrivals = Arrivals()
        if self._beat is not None:
            beat, self._beat = self._beat, None
            for pending in beat.pending:
                pending.wait()
            arrivals = self._settle(beat)
            for message in self._stream.take_in(beat.control):
                self._follow(message)
        self._beat = self._begin()
        return arrivals

    def tensor(self, ref: EmbeddingRef) -> Tensor:
        return self._feed.tensor(ref)

    def close(self) -> None:
        self._feed.close()

    def _say(self, message: _Want | _Forget) -> None:
        if self._group.rank != 0:
            raise ValueError("rank 0 alone decides what is wanted")
        self._stream.say(message)

    def _begin(self) -> _Beat:
        for index, taken in enumerate(self._slots):
            if taken is None and self._unslotted:
                self._slots[index] = self._unslotted.pop(next(iter(self._unslotted)))
        states = torch.tensor([self._state(want) for want in self._slots], dtype=torch.uint8)
        control = self._stream.cut()
        # In this order on every rank.
        pending = (self._group.minimum(states), self._group.broadcast(control))
        return _Beat(tuple(self._slots), states, control, pending)

    def _state(self, want: _Want | None) -> int:
        if want is None:
            return _HERE
        if want.request_id in self._lost_here:
            return _LOST
        return _HERE if self._feed.holds(want.request_id, want.refs) else _UNDER_WAY

    def _settle(self, beat: _Beat) -> Arrivals:
        """What all ranks know now. Who is ready or lost needs its slot no longer."""
        ready: list[str] = []
        lost: list[tuple[str, EmbeddingLost]] = []
        for index, (want, state) in enumerate(zip(beat.slots, beat.states.tolist(), strict=True)):
            if want is None or state == _UNDER_WAY:
                continue
            self._slots[index] = None
            if state == _LOST:
                elsewhere = EmbeddingLost(f"another rank has lost the rows of request {want.request_id}")
                lost.append((want.request_id, self._lost_here.get(want.request_id, elsewhere)))
                continue
            ready.append(want.request_id)
            asked = self._asked.get(want.request_id)
            if asked is not None and asked.version == want.version:
                asked.agreed = asked.refs
        return Arrivals(tuple(ready), tuple(lost))

    def _follow(self, message: _Want | _Forget) -> None:
        """Do what rank 0 said: at the same step on every rank, itself included."""
        request_id = message.request_id
        self._unslotted.pop(request_id, None)
        self._slots = [None if want is not None and want.request_id == request_id else want for want in self._slots]
        match message:
            case _Want():
                self._feed.want(request_id, message.refs, message.deadline_unix_s)
                self._unslotted[request_id] = message
            case _Forget():
                self._feed.forget(request_id)
                self._lost_here.pop(request_id, None)
