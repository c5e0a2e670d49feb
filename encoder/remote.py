"""One replica as a client sees it: its link, what it owes, the leases it gave, and whether it can be used."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from encoder.errors import EncodeDeadline, EncoderUnavailable, ReplicaLost
from encoder.failures import error_of
from encoder.links import Link, LinkDown
from encoder.types import (
    ARENA_STUCK_AFTER_S,
    CancelEncode,
    EncodeFailure,
    EncodeReply,
    EncodeRequest,
    EncoderInfo,
    Farewell,
    Goodbye,
    KeepLeases,
    Ping,
    ReleaseLeases,
)
from encoder.wire import TensorFrame

Answer = tuple[EncodeReply, Sequence[TensorFrame]]

# The server answers at the deadline; this much later the client stops believing that it will.
REPLY_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    deadline_unix_s: float
    answer: asyncio.Future[Answer]


class Remote:
    """On one event loop.

    Every request ends once: with its answer, by its deadline, or with ReplicaLost. Every lease is in the books from its
    reply to `release`, so that after a connection was lost the other side can be told which ones are still held: see
    `KeepLeases`.
    """

    def __init__(
        self, link: Link, on_change: Callable[[], None], *, max_unanswered: int, clock: Callable[[], float] = time.time
    ) -> None:
        """After `max_unanswered` pings without a word the replica has lost what it owes. `clock` gives Unix seconds."""
        self.link = link
        self.info: EncoderInfo | None = None
        self.is_retired = False
        """It is no longer listed, and asked nothing more."""
        self._on_change = on_change
        self._max_unanswered = max_unanswered
        self._clock = clock
        self._sequence = 0
        self._unanswered = 0
        self._heard_s: float | None = None
        self._owed: dict[str, _Asked] = {}
        # By id, when it ends by itself at the latest.
        self._held: dict[str, float] = {}
        link.on_change = self._link_changed

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def is_up(self) -> bool:
        return self.link.connected and self.info is not None and self.info.ready

    @property
    def why_not_up(self) -> str | None:
        """None when it is up, else a reason for people."""
        if self.is_up:
            return None
        hangs = self.link.is_silent or (self.link.connected and self.info is None and self._heard_s is not None)
        if not hangs:
            return "not up"
        if self._heard_s is None:
            return "does not answer"
        return f"does not answer, for {max(0.0, self._clock() - self._heard_s):.0f} s now"

    @property
    def is_sound(self) -> bool:
        """Up, and nothing suggests that it will be long in answering."""
        return (
            self.is_up
            and self.info is not None
            and not self.info.wedged
            and self.info.arena_locked_s <= ARENA_STUCK_AFTER_S
            and 2 * self._unanswered <= self._max_unanswered
        )

    @property
    def load(self) -> int:
        """Requests that it owes an answer."""
        return len(self._owed)

    @property
    def num_held(self) -> int:
        """Leases it gave that were not given back."""
        return len(self._held)

    def holds(self, lease_id: str) -> bool:
        return lease_id in self._held

    async def ask(self, request: EncodeRequest, content: bytes | None) -> Answer:
        """No content for a request that knows the key alone.

        Raises what the encoder raised, ReplicaLost, EncodeDeadline. Who is cancelled leaves nothing behind.
        """
        asked = _Asked(request.deadline_unix_s, asyncio.get_running_loop().create_future())
        self._owed[request.request_id] = asked
        try:
            self.link.send(request, [] if content is None else [TensorFrame.of_bytes(content)])
            timeout_s = max(0.0, request.deadline_unix_s - self._clock()) + REPLY_GRACE_S
            await asyncio.wait({asked.answer}, timeout=timeout_s)
            if not asked.answer.done():
                raise EncodeDeadline("the encoder did not answer before the deadline")
            return asked.answer.result()
        except LinkDown as error:
            raise ReplicaLost(str(error)) from error
        except asyncio.CancelledError:
            # Answered in the same moment: nobody else would give that lease back.
            if asked.answer.done() and asked.answer.exception() is None:
                self.release(asked.answer.result()[0].ref.lease_id)
            raise
        finally:
            if self._owed.pop(request.request_id, None) is not None:
                self._cancel(request.request_id)

    def release(self, lease_id: str) -> bool:
        """End a lease; False when the replica cannot be told now. It will be, if it is one of its own."""
        self._held.pop(lease_id, None)
        try:
            self.link.send(ReleaseLeases(lease_ids=(lease_id,)))
        except LinkDown:
            return False
        return True

    def ping(self) -> None:
        """One period has passed. Time that this process itself did not run does not count as silence."""
        if self.is_up and self._unanswered >= self._max_unanswered:
            self.lose(f"has not answered {self._unanswered} pings")
        self._unanswered += self.link.connected
        self._sequence += 1
        with contextlib.suppress(LinkDown):
            self.link.send(Ping(sequence=self._sequence))
        now_s = self._clock()
        for lease_id in [lease_id for lease_id, ends_s in self._held.items() if ends_s < now_s]:
            del self._held[lease_id]

    def lose(self, reason: str) -> None:
        """Forget the replica's state and end everything it owes."""
        self.info = None
        owed, self._owed = self._owed, {}
        for request_id, asked in owed.items():
            # One that is only slow need not do it any more.
            self._cancel(request_id)
            if not asked.answer.done():
                asked.answer.set_exception(ReplicaLost(f"encoder {self.link.name} {reason}"))
        self._on_change()

    async def follow(self) -> None:
        """Take in messages until cancelled."""
        while True:
            message, tensors = await self.link.receive()
            self._unanswered, self._heard_s = 0, self._clock()
            match message:
                case EncoderInfo():
                    self._learn(message)
                case EncodeReply() | EncodeFailure():
                    self._settle(message, tensors)
                case Farewell(sequence=sequence):
                    self._stop_asking()
                    with contextlib.suppress(LinkDown):
                        self.link.send(Goodbye(sequence=sequence))

    def _stop_asking(self) -> None:
        """It ends, or will; until it says that it is ready it is asked no more."""
        if self.info is not None:
            self._learn(msgspec.structs.replace(self.info, ready=False))

    def _learn(self, info: EncoderInfo) -> None:
        if self.info is not None and self.info.incarnation != info.incarnation:
            self.lose("was restarted")
            self._keep_leases()
        self.info = info
        self._on_change()

    def _settle(self, message: EncodeReply | EncodeFailure, tensors: Sequence[TensorFrame]) -> None:
        asked = self._owed.pop(message.request_id, None)
        if asked is None or asked.answer.done():
            if isinstance(message, EncodeReply):
                # Nobody waits any more, so nobody else would release it.
                self.release(message.ref.lease_id)
        elif isinstance(message, EncodeReply):
            self._held[message.ref.lease_id] = asked.deadline_unix_s
            asked.answer.set_result((_with_source(message, self.link.name), tensors))
        else:
            error = error_of(message)
            if isinstance(error, EncoderUnavailable):
                self._stop_asking()
            asked.answer.set_exception(error)

    def _cancel(self, request_id: str) -> None:
        with contextlib.suppress(LinkDown):
            self.link.send(CancelEncode(request_id=request_id))

    def _keep_leases(self) -> None:
        with contextlib.suppress(LinkDown):
            self.link.send(KeepLeases(lease_ids=tuple(self._held)))

    def _link_changed(self) -> None:
        self._unanswered = 0
        if self.link.connected:
            # Before any request: what is given from now on is not meant.
            self._keep_leases()
            self.ping()
        else:
            self.lose("closed the connection")


def _with_source(reply: EncodeReply, address: str) -> EncodeReply:
    """The reply with the place where a reader on another host asks for the rows."""
    if not address.startswith("tcp://"):
        return reply
    return msgspec.structs.replace(reply, ref=msgspec.structs.replace(reply.ref, source=address))
