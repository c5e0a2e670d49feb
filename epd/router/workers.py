"""What the gateway knows about the workers, and the mailboxes of its requests.

    heartbeat   Hello to every worker, WorkerInfo back
    lost        disconnected, another incarnation, or silent for `timeout_s`: every attempt on the worker hears `Lost`
    messages    TokenDelta and Finish go to the attempt with that request id; when nobody waits for it any more they are
                late: dropped, and answered with Abort so that the worker stops

Everything runs on one asyncio loop; time is the clock passed in.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from epd.errors import StageUnavailable
from epd.router.policy import WorkerLoad, choose_worker, prefix_affinity
from epd.transport.base import Channel, ChannelClosed, WorkerDown
from epd.types import (
    Abort,
    ExpectKv,
    Finish,
    FinishReason,
    FromWorker,
    GenerateRequest,
    Hello,
    KvRefused,
    Role,
    Submit,
    TokenDelta,
    ToWorker,
    Usage,
    WorkerInfo,
)

logger = logging.getLogger(__name__)

_MAX_REMEMBERED_LATE = 4096


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that held the attempt is gone."""

    worker: str
    reason: str


Event = TokenDelta | Finish | Lost


class Attempt:
    """The mailbox of one submitted request. Closed by `Fleet.close`, exactly once, by whoever opened it.

    `handed_over` is set by the first word of the decode worker: from then on the prefill worker may die.
    """

    def __init__(self, request_id: str, workers: "tuple[Worker, ...]") -> None:
        self.request_id = request_id
        self.workers = workers
        self.finished_by: Worker | None = None
        self.handed_over = False
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def depends_on(self, worker: "Worker") -> bool:
        return worker is self.workers[-1] or not self.handed_over

    async def next_event(self) -> Event:
        return await self._events.get()

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)


@dataclass(eq=False, slots=True)
class Worker:
    """One engine process. `info` is None until it answered on the present connection."""

    channel: Channel
    role: Role
    info: WorkerInfo | None = None
    last_heard_s: float = 0.0
    attempts: dict[str, Attempt] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def ready(self) -> bool:
        return self.channel.connected and self.info is not None and self.info.ready

    def why_not_ready(self) -> str | None:
        """None when ready, else a reason for people."""
        if not self.channel.connected:
            return f"{self.address}: not connected"
        if self.info is None:
            return f"{self.address}: has not answered yet"
        return None if self.info.ready else f"{self.address}: still loading"

    def load(self) -> WorkerLoad:
        """Only of a worker that has answered."""
        info = self.info
        assert info is not None, f"worker {self.address} has no load before its first answer"
        return WorkerLoad(
            worker=self.address,
            num_assigned=sum(attempt.depends_on(self) for attempt in self.attempts.values()),
            num_reported=info.num_waiting + info.num_running,
            full_pages_free=info.full_pages_free,
            window_pages_free=info.window_pages_free,
        )


class Fleet:
    """All workers of one gateway. `decode` empty means that the `prefill` workers do both."""

    def __init__(
        self,
        *,
        prefill: Sequence[Channel],
        decode: Sequence[Channel],
        heartbeat_s: float,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        first_role = Role.PREFILL if decode else Role.BOTH
        self.workers = [
            *(Worker(channel, first_role) for channel in prefill),
            *(Worker(channel, Role.DECODE) for channel in decode),
        ]
        self.num_late_messages = 0
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._sequence = 0
        self._changed = asyncio.Event()
        self._late: OrderedDict[str, None] = OrderedDict()
        self._loops: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The stages a request passes, in order."""
        return tuple(dict.fromkeys(worker.role for worker in self.workers))

    def of_role(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    def max_context_tokens(self) -> int | None:
        """The smallest context among the workers that have answered; None before the first answer."""
        return min((worker.info.max_context_tokens for worker in self.workers if worker.info is not None), default=None)

    def start(self) -> None:
        """Open the channels and begin listening; call inside the running loop."""
        for worker in self.workers:
            worker.channel.on_connect = lambda worker=worker: self._connected(worker)
            worker.channel.on_disconnect = lambda worker=worker: self._lose(worker, "connection lost")
            worker.channel.open()
            self._loops.append(asyncio.create_task(self._listen(worker), name=f"listen {worker.address}"))
        self._loops.append(asyncio.create_task(self._beat(), name="worker heartbeat"))

    async def stop(self) -> None:
        """Hand over what is being sent, then close the channels."""
        if self._sends:
            await asyncio.wait(self._sends, timeout=1.0)
        for task in self._loops:
            task.cancel()
        for worker in self.workers:
            worker.channel.close()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def submit(self, request: GenerateRequest, *, give_up_s: float, avoid: Collection[str] = ()) -> Attempt:
        """Choose workers, waiting for a stage that is down until the clock reads `give_up_s`, and send the request.

        Raises StageUnavailable.
        """
        affinity = prefix_affinity(request)
        while True:
            chosen = await self._chosen(give_up_s, affinity, avoid)
            attempt = Attempt(request.request_id, chosen)
            for worker in chosen:
                worker.attempts[request.request_id] = attempt
            try:
                await self._send_request(request, chosen)
            except WorkerDown as error:
                # The connection broke between the choice and the send: its worker is not ready any more, choose again.
                logger.info("request %s: %s", request.request_id, error)
                self.close(attempt)
                await asyncio.sleep(0)
                continue
            except asyncio.CancelledError:
                self.close(attempt)
                raise
            return attempt

    def close(self, attempt: Attempt) -> None:
        """Forget the attempt; workers that did not end it themselves are told to stop. May be called twice."""
        for worker in attempt.workers:
            if worker.attempts.pop(attempt.request_id, None) is not None and worker is not attempt.finished_by:
                self._post(worker, Abort(request_id=attempt.request_id))

    def tick(self) -> None:
        """One heartbeat: greet every worker, and give up those that have been silent too long."""
        self._sequence += 1
        now = self._clock()
        for worker in self.workers:
            if not worker.channel.connected:
                continue
            if worker.info is not None and now - worker.last_heard_s > self._timeout_s:
                self._lose(worker, f"silent for {now - worker.last_heard_s:.1f} s")
            self._post(worker, Hello(sequence=self._sequence))

    async def _chosen(self, give_up_s: float, affinity: int, avoid: Collection[str]) -> tuple[Worker, ...]:
        while True:
            changed = self._changed
            chosen = [self._choose(role, affinity, avoid) for role in self.roles]
            workers = tuple(worker for worker in chosen if worker is not None)
            if workers and len(workers) == len(chosen):
                return workers
            left_s = give_up_s - self._clock()
            if left_s <= 0:
                missing = ", ".join(role for role, worker in zip(self.roles, chosen, strict=True) if worker is None)
                raise StageUnavailable(f"no worker is ready for: {missing or 'any stage'}", retry_after_s=5.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    def _choose(self, role: Role, affinity: int, avoid: Collection[str]) -> Worker | None:
        ready = {worker.address: worker for worker in self.of_role(role) if worker.ready}
        address = choose_worker([worker.load() for worker in ready.values()], affinity=affinity, avoid=avoid)
        return None if address is None else ready[address]

    async def _send_request(self, request: GenerateRequest, chosen: tuple[Worker, ...]) -> None:
        first = chosen[0]
        if len(chosen) == 1:
            await first.channel.send(Submit(request=request))
            return
        second = chosen[1]
        info = second.info
        if info is None:
            raise WorkerDown(f"worker at {second.address} was lost before the request was sent")
        # Decode must know whose deltas these are before the KV can arrive.
        await second.channel.send(ExpectKv(request=request))
        await first.channel.send(
            Submit(request=request, decode_address=info.address, decode_incarnation=info.incarnation)
        )

    async def _listen(self, worker: Worker) -> None:
        while True:
            try:
                message, _ = await worker.channel.receive()
            except ChannelClosed:
                return
            self._received(worker, message)

    async def _beat(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self._heartbeat_s)

    def _received(self, worker: Worker, message: FromWorker) -> None:
        worker.last_heard_s = self._clock()
        match message:
            case WorkerInfo():
                self._informed(worker, message)
            case TokenDelta():
                self._deliver(worker, message)
            case Finish():
                self._deliver(worker, message)
            case KvRefused(request_id=request_id, message=text):
                self._deliver(worker, _refusal(request_id, text))

    def _informed(self, worker: Worker, info: WorkerInfo) -> None:
        before = worker.info
        if before is not None and before.incarnation != info.incarnation:
            self._lose(worker, "restarted")
        was_ready = worker.ready
        worker.info = info
        if worker.ready != was_ready:
            self._wake_waiters()

    def _deliver(self, worker: Worker, event: TokenDelta | Finish) -> None:
        attempt = worker.attempts.get(event.request_id)
        if attempt is None:
            self._late_message(worker, event)
            return
        if worker is attempt.workers[-1]:
            attempt.handed_over = True
        if isinstance(event, Finish):
            attempt.finished_by = worker
            if event.retryable:
                self._doubt(worker)
        attempt.put(event)

    def _doubt(self, worker: Worker) -> None:
        """A worker that hands a request back (it drains, it is full) says how it is before it gets another one."""
        if worker.info is not None:
            worker.info = msgspec.structs.replace(worker.info, ready=False)
            self._post(worker, Hello(sequence=self._sequence))

    def _late_message(self, worker: Worker, event: TokenDelta | Finish) -> None:
        self.num_late_messages += 1
        # A Finish needs no answer, and one Abort per attempt is enough.
        if isinstance(event, TokenDelta) and event.request_id not in self._late:
            self._remember_late(event.request_id)
            self._post(worker, Abort(request_id=event.request_id))

    def _remember_late(self, request_id: str) -> None:
        self._late[request_id] = None
        while len(self._late) > _MAX_REMEMBERED_LATE:
            self._late.popitem(last=False)

    def _connected(self, worker: Worker) -> None:
        # What an earlier process said about itself is void.
        worker.info = None
        worker.last_heard_s = self._clock()
        self._post(worker, Hello(sequence=self._sequence))

    def _lose(self, worker: Worker, reason: str) -> None:
        if worker.info is not None or worker.attempts:
            logger.warning("worker %s lost: %s, %d requests on it", worker.address, reason, len(worker.attempts))
        worker.info = None
        for attempt in worker.attempts.values():
            if attempt.depends_on(worker):
                attempt.put(Lost(worker.address, reason))
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _post(self, worker: Worker, message: ToWorker) -> None:
        """Send without waiting; to a worker that is gone there is nothing to say."""
        if worker.channel.connected:
            task = asyncio.get_running_loop().create_task(_send(worker.channel, message))
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)


async def _send(channel: Channel, message: ToWorker) -> None:
    with contextlib.suppress(WorkerDown):
        await channel.send(message)


def _refusal(request_id: str, text: str) -> Finish:
    """A decode worker that does not take the KV ends the attempt, and another one may take it."""
    return Finish(
        request_id=request_id,
        reason=FinishReason.FAILED,
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        status=503,
        code="kv_refused",
        message=text,
        retryable=True,
    )
