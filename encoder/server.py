"""The encoder: receive -> admit -> batch -> run -> publish -> reply.

    request --admit--> cached? --yes--> lease, reply
                          | no
                       same key in flight? --yes--> wait with the others     (a locked arena: ask it again in flight)
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
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from encoder.cache.room import RoomQueue
from encoder.cache.store import EmbeddingStore, Reservation
from encoder.cache.usage import StoreUsage
from encoder.config import EncoderConfig
from encoder.errors import (
    ArenaLocked,
    DuplicateRequest,
    EmbeddingUnknown,
    EncodeCancelled,
    EncodeDeadline,
    EncoderBusy,
    EncoderError,
    EncoderUnavailable,
)
from encoder.failures import failure_of
from encoder.flight import Flight, Reply, Waiter, reply_of, verified_content
from encoder.footprint import footprint
from encoder.leasing import Leased, Leasing
from encoder.measures import COUNTED, EncodeMeasures
from encoder.passage import Arrival, Passage, Works
from encoder.rows import frame_of
from encoder.runner import TowerRunner
from encoder.tiers.second import SecondTier
from encoder.tower_queue import TowerQueue
from encoder.types import (
    CancelEncode,
    EncodeRequest,
    EncoderInfo,
    FetchRows,
    KeepLeases,
    Ping,
    ReleaseLeases,
    Replica,
    ToEncoder,
)
from encoder.wire import TensorFrame
from preprocess.config import ProcessorConfig
from preprocess.errors import MediaError
from preprocess.pool import DecodePool
from preprocess.types import MediaKey

logger = logging.getLogger(__name__)

HOUSEKEEPING_PERIOD_S = 1.0
PERIODS_PER_CHECK = 30  # an idle server checks its books
_STORE_DRAIN_S = 2.0


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
        self._usage = (store.usage(), len(store))
        self._room = RoomQueue(store, wait_s=config.arena_wait_s, clock=clock)
        self._leasing = Leasing(
            store, self._room, wait_s=config.arena_wait_s, max_lease_s=config.max_lease_s, clock=clock
        )
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
        self._waiters: dict[tuple[str, str], Waiter] = {}
        self._flights: dict[MediaKey, Flight] = {}
        self._flying: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        # From zero, so that a rate is known from the first one on.
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._prepare_s = 0.0
        self._measures = EncodeMeasures()

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
        with contextlib.suppress(EncoderBusy):
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
            case KeepLeases():
                self._counters["leases_reclaimed"] += self._store.keep_only(peer, set(message.lease_ids))
            case FetchRows():
                try:
                    self._leasing.send_rows(message, reply, peer)
                except ArenaLocked:
                    self._keep_flying(asyncio.create_task(self._leasing.send_rows_later(message, reply, peer)))
            case Ping():
                reply(self.info(message.sequence), ())

    def info(self, sequence: int = 0) -> EncoderInfo:
        """Identity, load and counters."""
        usage, num_cached = self._usage_now()
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
            num_cached=num_cached,
            cached_bytes=usage.evictable_bytes + usage.leased_bytes,
            capacity_bytes=usage.capacity_bytes,
            leased_bytes=usage.leased_bytes,
            ready=not self._draining,
            counters=self._all_counters(),
            histograms=(*self._measures.told(), *self._tower.told()),
            tower_busy_s=busy_s,
            wedged=busy_s > self._config.wedged_after_s,
            arena_locked_s=self._store.locked_s,
            page_bytes=self._config.page_bytes,
            arena=self._store.arena,
            video_backend=self._processor.video_backend,
        )

    def _usage_now(self) -> tuple[StoreUsage, int]:
        """Bytes and embeddings; the last known ones while another process keeps the arena locked."""
        with contextlib.suppress(EncoderBusy):
            self._usage = (self._store.usage(), len(self._store))
        return self._usage

    def _all_counters(self) -> dict[str, float]:
        tower = self._tower
        times_s = {"prepare_s": self._prepare_s, "tower_s": tower.tower_s}
        decoders = {f"decode_workers_{name}": number for name, number in self._pool.counters.items()}
        decoders["decode_stuck"] = self._pool.num_stuck
        tier = {} if self._second is None else self._second.all_counters()
        batches = {"batches": tower.num_batches, "batch_jobs": tower.num_jobs, **tower.runner_counters}
        return {**self._counters, **self._measures.tokens, **footprint(), **batches, **times_s, **decoders, **tier}

    def disconnect(self, peer: str) -> None:
        """A transport found that a peer is gone: end its requests and leases now instead of at their deadlines."""
        self.end_requests(peer)
        self._counters["leases_reclaimed"] += self._store.release_owner(peer)

    def end_requests(self, peer: str) -> None:
        """A peer cannot be reached, and whatever it asked for it asks again if it comes back."""
        for waiter in [waiter for (owner, _), waiter in self._waiters.items() if owner == peer]:
            self._fail(waiter, EncodeCancelled("the peer is gone"))

    def _receive(self, request: EncodeRequest, tensors: Sequence[TensorFrame], reply: Reply, peer: str) -> None:
        self._counters["requests"] += 1
        waiter = Waiter(request, peer, reply, self._clock())
        try:
            if (peer, request.request_id) in self._waiters:
                raise DuplicateRequest(f"request {request.request_id} is already in flight")
            is_unsure = False
            try:
                leased = self._leasing.find(request.key, [waiter])
            except ArenaLocked:
                leased, is_unsure = None, True
            if leased is None:
                self._admit(waiter, tensors, is_unsure=is_unsure)
            else:
                self._answer_cached(leased)
        except (EncoderError, MediaError) as error:
            self._counters["refused"] += 1
            self._refuse(waiter, error, None)

    def _answer_cached(self, leased: Leased) -> None:
        self._counters["hits"] += len(leased.refs)
        self._store.count(hits=len(leased.refs))
        self._answer(leased, None)

    def _admit(self, waiter: Waiter, tensors: Sequence[TensorFrame], *, is_unsure: bool) -> None:
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
            passage = None if request.key_only else self._passage(request, tensors)
            flight = Flight(request.key, passage, is_unsure=is_unsure)
            flight.task = asyncio.create_task(self._fly(flight))
            self._keep_flying(flight.task)
            self._flights[request.key] = flight
        else:
            self._counters["joined"] += 1
            if flight.passage is None and not request.key_only:
                flight.passage = self._passage(request, tensors)
        flight.waiters.append(waiter)
        self._waiters[waiter.peer, request.request_id] = waiter
        delay_s = request.deadline_unix_s - waiter.admitted_s
        waiter.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, waiter)

    def _passage(self, request: EncodeRequest, tensors: Sequence[TensorFrame]) -> Passage[Reservation]:
        """The way of the content. Raises the EncoderError or MediaError with which the request is refused."""
        content = verified_content(
            request,
            tensors,
            config=self._config,
            modalities=self._runner.modalities,
            processor=self._processor,
            fingerprint=self._replica.fingerprint,
            waiting_bytes=sum(flight.content_bytes for flight in self._flights.values()),
        )
        return Passage(self._works, content, modality=request.modality, options=request.options, key=request.key)

    def _keep_flying(self, task: "asyncio.Task[None]") -> None:
        self._flying.add(task)
        task.add_done_callback(self._flying.discard)

    async def _fly(self, flight: Flight) -> None:
        """Compute one key and reply to its waiters. Cancelled when the last of them leaves, unless all but done."""
        try:
            leased = await self._leasing.find_later(flight) if flight.is_unsure else None
            if leased is not None:
                self._answer_cached(leased)
            elif not await self._recall(flight):
                if flight.passage is None:
                    raise EmbeddingUnknown(f"no embedding is kept under the key {flight.key}")
                await self._encode(flight, flight.passage)
        except (EncoderError, MediaError) as error:
            self._end_flight(flight, error)
        except Exception:  # outermost loop of a job: it must not end in silence
            logger.exception("encoding %s failed", flight.key)
            self._end_flight(flight, EncoderError("internal error while encoding this medium"))
        finally:
            self._prepare_s += flight.timings.prepare_s
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]

    async def _encode(self, flight: Flight, passage: Passage[Reservation]) -> None:
        """Decode, run the tower, publish; and tell the second tier."""
        self._store.count(misses=1)
        arrival = await passage.run(lambda: self._remaining_s(flight))
        await self._land(flight, arrival)
        self._counters["encoded"] += 1
        self._measures.encoded(passage.timings, arrival.layout)
        if self._second is not None:
            self._second.keep(flight.key)

    async def _recall(self, flight: Flight) -> bool:
        """Publish what the second tier has of this key; False if there is none."""
        record = None if self._second is None else await self._second.find(flight.key)
        if record is None:
            return False
        header = record.header
        place = await self._room.reserve(flight.key, header.layout.num_rows)
        place.destination[:] = record.rows
        self._counters["recalled"] += 1
        flight.is_cached = True
        await self._land(flight, Arrival(place, header.layout, header.checksum, header.warnings))
        return True

    async def _land(self, flight: Flight, arrival: Arrival[Reservation]) -> None:
        """Publish, and reply to all who wait. Raises EncoderBusy with nothing published and nobody replied to."""
        leased = await self._leasing.publish(flight, arrival)
        self._answer(leased, flight)

    def _remaining_s(self, flight: Flight) -> float:
        """Whoever has joined by now is waited for, not only the first."""
        now_s = self._clock()
        return max([0.001, *(waiter.request.deadline_unix_s - now_s for waiter in flight.waiters)])

    def _end_flight(self, flight: Flight, error: EncoderError | MediaError) -> None:
        self._counters["failed"] += 1
        for waiter in list(flight.waiters):
            self._fail(waiter, error)

    def _answer(self, leased: Leased, flight: Flight | None) -> None:
        """Reply with a reference to each who has a lease; none of them had left when the leases were given."""
        for waiter, ref in leased.refs:
            self._forget(waiter)
            now_s = self._clock()
            reply = reply_of(waiter, ref, leased.entry, flight, now_s)
            self._measures.answered(waiter, reply, None if flight is None else flight.moments, now_s)
            waiter.reply(reply, (frame_of(self._store, ref),) if waiter.request.inline else ())

    def _fail(self, waiter: Waiter, error: EncoderError | MediaError) -> None:
        flight = self._flights.get(waiter.request.key)
        self._forget(waiter)
        self._refuse(waiter, error, flight)

    def _refuse(self, waiter: Waiter, error: EncoderError | MediaError, flight: Flight | None) -> None:
        failure = failure_of(waiter.request.request_id, error)
        self._measures.failed(waiter, failure, None if flight is None else flight.moments, self._clock())
        waiter.reply(failure, ())

    def _expire(self, waiter: Waiter) -> None:
        self._counters["deadlines"] += 1
        self._fail(waiter, EncodeDeadline("the deadline passed before the embedding was ready"))

    def _forget(self, waiter: Waiter) -> None:
        """The waiter is about to get its reply. A flight nobody waits for any more stops, unless it is all but done."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._waiters.pop((waiter.peer, waiter.request.request_id), None)
        flight = self._flights.get(waiter.request.key)
        if flight is None or waiter not in flight.waiters:
            return
        flight.waiters.remove(waiter)
        abandoned = not flight.waiters and not flight.is_landing
        if abandoned and flight.task is not None and flight.task is not asyncio.current_task():
            del self._flights[flight.key]
            flight.task.cancel()

    async def _keep_house(self) -> None:
        for period in itertools.count():
            await asyncio.sleep(HOUSEKEEPING_PERIOD_S)
            try:
                self._counters["leases_reclaimed"] += self._store.expire(self._clock())
                self._store.tidy()
                if not self._flying and period % PERIODS_PER_CHECK == 0:
                    self._store.check()
            except EncoderBusy as error:
                logger.warning("housekeeping waits: %s", error)
