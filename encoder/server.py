"""The encoder: receive -> admit -> batch -> run -> publish -> reply.

    request --admit--> cached? --yes--> lease, reply
                          | no
                       same key in flight? --yes--> wait with the others
                          | no
                       flight: in the second tier? --yes--> publish -> reply to all
                                  | no                         (see `encoder.tiers.second`)
                               open -> reserve -> decode -> batcher -> tower thread -> publish -> reply to all
                                                    '--- part by part ---'            (see `encoder.passage`)

Everything here runs on one event loop and never waits on it; decoding and towers have threads of their own. Every
admitted request gets exactly one reply. Messages come from any transport: `handle` takes the message, its tensors and a
function that sends the reply.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from encoder.cache.room import RoomQueue
from encoder.cache.store import EmbeddingStore, Reservation
from encoder.config import EncoderConfig
from encoder.errors import (
    DuplicateRequest,
    EncodeCancelled,
    EncodeDeadline,
    EncoderBusy,
    EncoderError,
    EncoderUnavailable,
    KeyMismatch,
    WireError,
)
from encoder.failures import failure_of
from encoder.passage import Passage, Works
from encoder.rows import frame_of, rows_of
from encoder.runner import TowerRunner
from encoder.tiers.second import SecondTier
from encoder.tower_queue import TowerQueue
from encoder.types import (
    CancelEncode,
    EncodeReply,
    EncodeRequest,
    EncoderInfo,
    FetchRows,
    FromEncoder,
    Ping,
    ReleaseLeases,
    StageTimings,
    ToEncoder,
)
from encoder.wire import TensorFrame
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaError, MediaUnsupported
from preprocess.keys import media_key
from preprocess.pool import DecodePool
from preprocess.types import MediaKey

logger = logging.getLogger(__name__)

Reply = Callable[[FromEncoder, Sequence[TensorFrame]], None]
HOUSEKEEPING_PERIOD_S = 1.0
PERIODS_PER_CHECK = 30  # an idle server checks its books
_STORE_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Who this encoder is: its name, this start of the process, and the weights it runs."""

    name: str
    incarnation: str
    fingerprint: str


@dataclass(slots=True, eq=False)
class _Waiter:
    """One admitted request. It leaves `EncoderServer._waiters` when its single reply is sent."""

    request: EncodeRequest
    peer: str
    reply: Reply
    admitted_s: float
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Flight:
    """The one computation of a key that is not cached, and everyone who waits for it."""

    key: MediaKey
    passage: Passage[Reservation]
    waiters: list[_Waiter] = field(default_factory=list)
    is_recalled: bool = False
    """The second tier had it."""
    task: "asyncio.Task[None] | None" = None


class EncoderServer:
    """One replica. `start` it inside a running loop, `stop` it to drain; runner, store and pool stay the caller's."""

    def __init__(
        self,
        config: EncoderConfig,
        *,
        replica: Replica,
        runner: TowerRunner,
        store: EmbeddingStore,
        pool: DecodePool,
        processor: ProcessorConfig,
        second: SecondTier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`second` is started and stopped with the server. `clock` gives Unix seconds, the time base of deadlines."""
        self._config = config
        self._replica = replica
        self._runner = runner
        self._store = store
        self._room = RoomQueue(store, wait_s=config.arena_wait_s, clock=clock)
        self._pool = pool
        self._processor = processor
        self._clock = clock
        self._tower = TowerQueue(config, runner, clock)
        self._works: Works[Reservation] = Works(
            processor=processor,
            pool=pool,
            tower=self._tower,
            room=self._room,
            decoders=asyncio.Semaphore(config.decode_threads),
            raw=config.sends_pixels,
            clock=clock,
        )
        self._second = second
        self._waiters: dict[tuple[str, str], _Waiter] = {}
        self._flights: dict[MediaKey, _Flight] = {}
        self._flying: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._counters: Counter[str] = Counter()
        self._prepare_s = 0.0

    def start(self) -> None:
        """Begin to run batches and to reclaim expired leases."""
        self._tasks = [asyncio.create_task(self._tower.run()), asyncio.create_task(self._keep_house())]
        if self._second is not None:
            self._tasks.append(self._second.start())

    async def stop(self, drain_s: float = 10.0) -> None:
        """Refuse new requests, give those in flight `drain_s`, end the rest with an error, check the books."""
        self._draining = True
        if self._flying:
            await asyncio.wait(self._flying, timeout=drain_s)
        for waiter in list(self._waiters.values()):
            self._fail(waiter, EncoderUnavailable("the encoder is shutting down"))
        # Who is in the tower finishes there: its memory must not be given away under it.
        if self._flying:
            await asyncio.wait(self._flying)
        if self._second is not None:
            await self._second.stop(_STORE_DRAIN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.check()

    @property
    def tasks(self) -> tuple["asyncio.Task[None]", ...]:
        """What `start` began. None of them ends before `stop`; one that does has failed, and the process with it."""
        return tuple(self._tasks)

    def handle(self, message: ToEncoder, tensors: Sequence[TensorFrame], reply: Reply, *, peer: str = "local") -> None:
        """Take one message. Returns at once; `reply` is called later on the same loop, or now for a cached key."""
        match message:
            case EncodeRequest():
                self._receive(message, tensors, reply, peer)
            case CancelEncode():
                waiter = self._waiters.get((peer, message.request_id))
                if waiter is not None:
                    self._counters["cancelled"] += 1
                    self._fail(waiter, EncodeCancelled("the request was cancelled"))
            case ReleaseLeases():
                for lease_id in message.lease_ids:
                    self._store.release(lease_id)
            case FetchRows():
                reply(*rows_of(self._store, message, asker=peer))
            case Ping():
                reply(self.info(message.sequence), ())

    def info(self, sequence: int = 0) -> EncoderInfo:
        """Identity, load and counters."""
        usage = self._store.usage()
        busy_s = self._tower.busy_s
        return EncoderInfo(
            sequence=sequence,
            replica=self._replica.name,
            incarnation=self._replica.incarnation,
            fingerprint=self._replica.fingerprint,
            width=self._runner.width,
            dtype=self._runner.dtype,
            modalities=self._runner.modalities,
            num_pending=len(self._waiters),
            num_cached=len(self._store),
            cached_bytes=usage.evictable_bytes + usage.leased_bytes,
            capacity_bytes=usage.capacity_bytes,
            leased_bytes=usage.leased_bytes,
            ready=not self._draining,
            counters=self._all_counters(),
            tower_busy_s=busy_s,
            wedged=busy_s > self._config.wedged_after_s,
            page_bytes=self._config.page_bytes,
            video_backend=self._processor.video_backend,
        )

    def _all_counters(self) -> dict[str, float]:
        tower = self._tower
        times_s = {"prepare_s": self._prepare_s, "tower_s": tower.tower_s}
        decoders = {f"decode_workers_{name}": number for name, number in self._pool.counters.items()}
        decoders["decode_stuck"] = self._pool.num_stuck
        tier = {} if self._second is None else self._second.all_counters()
        batches = {"batches": tower.num_batches, "batch_jobs": tower.num_jobs}
        return {**self._counters, **batches, **times_s, **decoders, **tier}

    def disconnect(self, peer: str) -> None:
        """A transport found that a peer is gone: end its requests and leases now instead of at their deadlines."""
        for waiter in [waiter for (owner, _), waiter in self._waiters.items() if owner == peer]:
            self._fail(waiter, EncodeCancelled("the peer is gone"))
        self._counters["leases_reclaimed"] += self._store.release_owner(peer)

    def _receive(self, request: EncodeRequest, tensors: Sequence[TensorFrame], reply: Reply, peer: str) -> None:
        self._counters["requests"] += 1
        waiter = _Waiter(request, peer, reply, self._clock())
        try:
            if (peer, request.request_id) in self._waiters:
                raise DuplicateRequest(f"request {request.request_id} is already in flight")
            if self._store.lookup(request.key) is not None:
                self._counters["hits"] += 1
                self._answer(waiter, cached=True, timings=StageTimings())
                return
            self._admit(waiter, tensors)
        except (EncoderError, MediaError) as error:
            self._counters["refused"] += 1
            reply(failure_of(request.request_id, error), ())

    def _admit(self, waiter: _Waiter, tensors: Sequence[TensorFrame]) -> None:
        """Join or open a flight. Raises the EncoderError or MediaError with which the request is refused."""
        request = waiter.request
        if self._draining:
            raise EncoderUnavailable("the encoder is shutting down")
        if waiter.admitted_s >= request.deadline_unix_s:
            raise EncodeDeadline("the deadline had passed on arrival")
        if len(self._waiters) >= self._config.max_pending:
            limit = f"{self._config.max_pending} requests are in flight"
            raise EncoderBusy(limit, retry_after_s=self._config.retry_after_s)
        flight = self._flights.get(request.key)
        if flight is None:
            content = self._verified_content(request, tensors)
            passage = Passage(self._works, content, modality=request.modality, options=request.options, key=request.key)
            flight = _Flight(request.key, passage)
            flight.task = asyncio.create_task(self._fly(flight))
            self._flying.add(flight.task)
            flight.task.add_done_callback(self._flying.discard)
            self._flights[request.key] = flight
        else:
            self._counters["joined"] += 1
        flight.waiters.append(waiter)
        self._waiters[waiter.peer, request.request_id] = waiter
        delay_s = request.deadline_unix_s - waiter.admitted_s
        waiter.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, waiter)

    def _verified_content(self, request: EncodeRequest, tensors: Sequence[TensorFrame]) -> bytes:
        if request.modality not in self._runner.modalities:
            raise MediaUnsupported(f"this model has no tower for {request.modality}")
        if len(tensors) != 1 or tensors[0].dtype != "uint8":
            raise WireError("an encode request carries its content as one uint8 frame")
        waiting_bytes = sum(flight.passage.content_bytes for flight in self._flights.values())
        if waiting_bytes and waiting_bytes + tensors[0].data.nbytes > self._config.max_pending_bytes:
            limit = f"{waiting_bytes} bytes of media wait to be decoded"
            raise EncoderBusy(limit, retry_after_s=self._config.retry_after_s)
        content = bytes(tensors[0].data)
        expected = media_key(
            content,
            modality=request.modality,
            options=request.options,
            processor=self._processor,
            tower_fingerprint=self._replica.fingerprint,
        )
        if expected != request.key:
            # The key decides what others get from the cache: it is never taken on trust.
            raise KeyMismatch(f"key {request.key} was given, this encoder computes {expected}")
        return content

    async def _fly(self, flight: _Flight) -> None:
        """Compute one key and reply to its waiters. Cancelled when the last of them leaves, unless all but done."""
        try:
            if not await self._recall(flight):
                await self._encode(flight)
        except (EncoderError, MediaError) as error:
            self._end_flight(flight, error)
        except Exception:  # outermost loop of a job: it must not end in silence
            logger.exception("encoding %s failed", flight.key)
            self._end_flight(flight, EncoderError("internal error while encoding this medium"))
        else:
            self._end_flight(flight, None)
        finally:
            self._prepare_s += flight.passage.timings.prepare_s
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]

    async def _encode(self, flight: _Flight) -> None:
        """Decode, run the tower, publish; and tell the second tier."""
        arrival = await flight.passage.run(lambda: self._remaining_s(flight))
        self._store.publish(arrival.place, layout=arrival.layout, checksum=arrival.checksum, warnings=arrival.warnings)
        self._counters["encoded"] += 1
        if self._second is not None:
            self._second.keep(flight.key)

    async def _recall(self, flight: _Flight) -> bool:
        """Publish what the second tier has of this key; False if there is none."""
        record = None if self._second is None else await self._second.find(flight.key)
        if record is None:
            return False
        header = record.header
        place = await self._room.reserve(flight.key, header.layout.num_rows)
        place.destination[:] = record.rows
        self._store.publish(place, layout=header.layout, checksum=header.checksum, warnings=header.warnings)
        self._counters["recalled"] += 1
        flight.is_recalled = True
        return True

    def _remaining_s(self, flight: _Flight) -> float:
        """Whoever has joined by now is waited for, not only the first."""
        now_s = self._clock()
        return max([0.001, *(waiter.request.deadline_unix_s - now_s for waiter in flight.waiters)])

    def _end_flight(self, flight: _Flight, error: EncoderError | MediaError | None) -> None:
        if error is not None:
            self._counters["failed"] += 1
        for waiter in list(flight.waiters):
            if error is None:
                self._answer(waiter, cached=flight.is_recalled, timings=flight.passage.timings)
            else:
                self._fail(waiter, error)

    def _answer(self, waiter: _Waiter, *, cached: bool, timings: StageTimings) -> None:
        """Reply with a leased reference."""
        self._forget(waiter)
        request, now_s = waiter.request, self._clock()
        entry = self._store.lookup(request.key)
        assert entry is not None, "answered keys are published"
        expires_s = min(request.deadline_unix_s, now_s + self._config.max_lease_s)
        ref = self._store.lease(request.key, owner=waiter.peer, expires_s=expires_s)
        tensors = (frame_of(self._store, ref),) if request.inline else ()
        spent_s = timings.prepare_s + timings.batch_wait_s + timings.tower_s
        reply = EncodeReply(
            request_id=request.request_id,
            key=request.key,
            layout=entry.layout,
            ref=ref,
            cached=cached,
            timings=StageTimings(
                queue_s=max(0.0, now_s - waiter.admitted_s - spent_s),
                prepare_s=timings.prepare_s,
                batch_wait_s=timings.batch_wait_s,
                tower_s=timings.tower_s,
            ),
            warnings=entry.warnings,
        )
        waiter.reply(reply, tensors)

    def _fail(self, waiter: _Waiter, error: EncoderError | MediaError) -> None:
        self._forget(waiter)
        waiter.reply(failure_of(waiter.request.request_id, error), ())

    def _expire(self, waiter: _Waiter) -> None:
        self._counters["deadlines"] += 1
        self._fail(waiter, EncodeDeadline("the deadline passed before the embedding was ready"))

    def _forget(self, waiter: _Waiter) -> None:
        """The waiter is about to get its reply. A flight nobody waits for any more stops, unless it is all but done."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._waiters.pop((waiter.peer, waiter.request.request_id), None)
        flight = self._flights.get(waiter.request.key)
        if flight is None or waiter not in flight.waiters:
            return
        flight.waiters.remove(waiter)
        abandoned = not flight.waiters and not flight.passage.is_landing
        if abandoned and flight.task is not None and flight.task is not asyncio.current_task():
            del self._flights[flight.key]
            flight.task.cancel()

    async def _keep_house(self) -> None:
        for period in itertools.count():
            await asyncio.sleep(HOUSEKEEPING_PERIOD_S)
            self._counters["leases_reclaimed"] += self._store.expire(self._clock())
            if not self._flying and period % PERIODS_PER_CHECK == 0:
                self._store.check()
