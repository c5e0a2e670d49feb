"""The client's books under any course of events: every call ends once, and no lease is lost or ended too soon.

Replicas are made of lists: what they were told and have not read, what they have read and not answered. The leases they
gave stand in one ledger, as in the arena that the replicas of a host share.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.client import EncoderClient
from encoder.errors import EncodeDeadline, EncoderBusy, EncoderUnavailable, ReplicaLost
from encoder.links import LinkDown, Received
from encoder.types import (
    CancelEncode,
    EmbeddingRef,
    EncodeFailure,
    EncodeReply,
    EncodeRequest,
    EncoderInfo,
    FromEncoder,
    KeepLeases,
    Ping,
    ReleaseLeases,
    StageTimings,
    ToEncoder,
)
from encoder.wire import TensorFrame
from preprocess.errors import MediaUndecodable
from preprocess.types import MediaKey, MediaLayout, MediaOptions, Modality
from tests.fakes.loop_clock import LoopClock

NUM_REPLICAS = 3
PING_PERIOD_S = 1.0
SILENCE_TIMEOUT_S = 5.0
DEADLINE_S = 100.0


class Ledger:
    """Leases of one arena: who was given them."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.num_given = 0
        self.num_ended = 0

    def give(self, holder: str, owner: str) -> str:
        self.num_given += 1
        lease_id = f"{holder}:{self.num_given}"
        self.owners[lease_id] = owner
        return lease_id

    def end(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self.num_ended += self.owners.pop(lease_id, None) is not None

    def keep_only(self, owner: str, lease_ids: Sequence[str]) -> None:
        self.end([lease for lease, of in self.owners.items() if of == owner and lease not in lease_ids])


class FakeReplica:
    """A link and the process behind it. A connection keeps its order, and loses what is on its way when it ends."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.on_change: Callable[[], None] | None = None
        self.name = name
        self.connected = False
        self.runs = True
        self.drains = False
        self.requests: list[EncodeRequest] = []
        # Nobody could tell it that these are not waited for any more.
        self.orphans: set[str] = set()
        self._ledger = ledger
        self._starts = 1
        self._unread: list[ToEncoder] = []
        self._inbox: asyncio.Queue[Received] = asyncio.Queue()

    # The client's side

    def open(self) -> None:
        self.connect()

    def close(self) -> None:
        self.connected = False

    def send(self, message: ToEncoder, tensors: Sequence[TensorFrame] = ()) -> None:
        if not self.connected:
            raise LinkDown(self.name)
        self._unread.append(message)
        self.read()

    async def receive(self) -> Received:
        return await self._inbox.get()

    # What happens to it

    def connect(self) -> None:
        if not self.connected:
            self._changed(True)

    def disconnect(self) -> None:
        """What had arrived is read; what it says from now on is lost."""
        if self.connected:
            unread = [message for message in self._unread if isinstance(message, EncodeRequest)]
            self.orphans.update(request.request_id for request in (*self.requests, *unread))
            self._changed(False)

    def die(self) -> None:
        """With it goes what it had not read, and what it was doing."""
        self._unread.clear()
        self.requests.clear()
        self.drains = False
        self._starts += 1
        self.disconnect()

    def read(self) -> None:
        while self.runs and self._unread:
            match self._unread.pop(0):
                case EncodeRequest() as request if self.drains:
                    self._fail(request, "encoder_unavailable")
                case EncodeRequest() as request:
                    self.requests.append(request)
                case CancelEncode(request_id=request_id):
                    self.requests = [request for request in self.requests if request.request_id != request_id]
                case ReleaseLeases(lease_ids=lease_ids):
                    self._ledger.end(lease_ids)
                case KeepLeases(lease_ids=lease_ids):
                    self._ledger.keep_only(self.name, lease_ids)
                case Ping(sequence=sequence):
                    self._say(info_of(self, sequence))

    def answer(self, how: str) -> None:
        """The oldest request gets its answer, whether or not there is still somebody to hear it."""
        if not self.requests or not self.runs:
            return
        request = self.requests.pop(0)
        if how == "encoded":
            self._say(reply_of(request, self._ledger.give(self.incarnation, self.name)))
        else:
            self._fail(request, how)

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self._starts}"

    def _fail(self, request: EncodeRequest, code: str) -> None:
        self._say(EncodeFailure(request_id=request.request_id, code=code, message=code, status=503))

    def _say(self, message: FromEncoder) -> None:
        if self.connected:
            self._inbox.put_nowait((message, ()))

    def _changed(self, connected: bool) -> None:
        self.connected = connected
        if self.on_change is not None:
            self.on_change()


def info_of(replica: FakeReplica, sequence: int) -> EncoderInfo:
    return EncoderInfo(
        sequence=sequence,
        replica=replica.name,
        incarnation=replica.incarnation,
        fingerprint="f",
        width=4,
        dtype="float32",
        modalities=(Modality.IMAGE,),
        num_pending=len(replica.requests),
        num_cached=0,
        cached_bytes=0,
        capacity_bytes=0,
        leased_bytes=0,
        ready=not replica.drains,
        wedged=len(replica.requests) > 5,
        arena="arena",
    )


def reply_of(request: EncodeRequest, lease_id: str) -> EncodeReply:
    ref = EmbeddingRef(
        key=request.key,
        arena="arena",
        offset_bytes=0,
        num_rows=1,
        width=4,
        dtype="float32",
        checksum=0,
        lease_id=lease_id,
    )
    layout = MediaLayout(modality=Modality.IMAGE, grid_thw=(1, 2, 2))
    return EncodeReply(
        request_id=request.request_id, key=request.key, layout=layout, ref=ref, cached=False, timings=StageTimings()
    )


class Play:
    """One course of events."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.replicas = [FakeReplica(f"r{index}", self.ledger) for index in range(NUM_REPLICAS)]
        self.clock = LoopClock()
        loop = asyncio.get_running_loop()
        started_s, began_s = time.time(), loop.time()
        self.unix_s = lambda: started_s + loop.time() - began_s
        self.client = EncoderClient(
            self.replicas, ping_period_s=PING_PERIOD_S, silence_timeout_s=SILENCE_TIMEOUT_S, clock=self.unix_s
        )
        self.calls: list[asyncio.Task[EncodeReply]] = []
        self.released: set[str] = set()

    def held(self) -> set[str]:
        """What the callers have and may be reading at this moment."""
        ended = [call for call in self.calls if call.done() and not call.cancelled() and call.exception() is None]
        return {call.result().ref.lease_id for call in ended} - self.released

    async def step(self, event: tuple[str, int, int]) -> None:
        kind, at, number = event
        replica = self.replicas[at]
        match kind:
            case "ask":
                key = MediaKey(f"{number:032x}")
                deadline_unix_s = self.unix_s() + DEADLINE_S
                asking = self.client.encode(b"content", Modality.IMAGE, MediaOptions(), key, deadline_unix_s)
                self.calls.append(asyncio.create_task(asking))
            case "cancel" if self.calls:
                self.calls[number % len(self.calls)].cancel()
            case "release":
                self.release(number)
            case "answer and cancel":
                # In one step of the loop: whoever asked is woken and cancelled at once.
                replica.answer("encoded")
                if self.calls:
                    await asyncio.sleep(0)
                    self.calls[number % len(self.calls)].cancel()
            case "answer":
                replica.answer(("encoded", "encoded", "encoded", "encoder_busy", "media_undecodable")[number % 5])
            case "drain":
                replica.drains = True
            case "stop":
                replica.runs = False
            case "continue":
                replica.runs = True
                replica.read()
            case "advance":
                # In steps of a ping, as time goes by.
                for _ in range(number % 8):
                    await self.clock.advance(1.0)
            case "connect" | "disconnect" | "die":
                getattr(replica, kind)()
        for _ in range(10 * (number % 2)):
            # Events may follow each other faster than tasks run.
            await asyncio.sleep(0)
        assert self.held() <= set(self.ledger.owners), "a lease was ended while its rows were read"

    def release(self, number: int) -> None:
        held = sorted(self.held())
        if not held:
            return
        lease_id = held[number % len(held)]
        call = next(
            call
            for call in self.calls
            if call.done() and not call.cancelled() and not call.exception() and call.result().ref.lease_id == lease_id
        )
        self.released.add(lease_id)
        self.client.release(call.result().ref)

    async def end(self) -> None:
        """Everything that is broken is mended, and everything asked for is answered."""
        for replica in self.replicas:
            replica.drains = False
            replica.runs = True
            replica.read()
            replica.connect()
        for _ in range(1000):
            await self.clock.advance(0.3)
            for replica in self.replicas:
                replica.answer("encoded")
            if all(call.done() for call in self.calls):
                break
        for _ in range(8):
            await self.clock.advance(1.0)
        assert all(call.done() for call in self.calls), "a call never ended"
        for call in self.calls:
            if not call.cancelled() and call.exception() is not None:
                allowed = (EncoderBusy, ReplicaLost, EncoderUnavailable, MediaUndecodable, EncodeDeadline)
                assert isinstance(call.exception(), allowed), call.exception()
        self.check()
        for _ in range(len(self.held())):
            self.release(0)
        await self.clock.advance(0.1)
        self.check()
        assert self.ledger.num_given == self.ledger.num_ended

    def check(self) -> None:
        """Nobody waits and everything has been read: given is released and held, nothing else."""
        assert set(self.ledger.owners) == self.held()
        assert self.client.num_held == len(self.held())
        assert self.ledger.num_given == self.ledger.num_ended + len(self.held())
        assert self.client.loads() == dict.fromkeys([replica.name for replica in self.replicas], 0)
        for replica in self.replicas:
            assert {request.request_id for request in replica.requests} <= replica.orphans, (
                "not waited for, nor cancelled"
            )


KINDS = ["ask"] * 6 + ["answer"] * 4 + ["release", "cancel", "answer and cancel", "advance", "advance"]
KINDS += ["die", "disconnect", "connect", "connect", "connect", "drain", "stop", "continue", "continue"]
events = st.tuples(st.sampled_from(KINDS), st.integers(0, NUM_REPLICAS - 1), st.integers(0, 99))


@settings(deadline=None, max_examples=60)
@given(st.lists(events, min_size=40, max_size=100))
def test_every_call_ends_once_and_no_lease_is_lost_or_ended_too_soon(course: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        it = Play()
        try:
            async with it.client:
                for event in course:
                    await it.step(event)
                await it.end()
        finally:
            it.clock.restore()

    asyncio.run(play())
