"""What the gateway knows about the workers, and the mailboxes of its requests.

    heartbeat   Hello to every worker, WorkerInfo back
    pairs       a request goes to workers that hold KV in the same way, by the fingerprints they report
    lost        disconnected, another incarnation, or silent for `timeout_s`: every attempt on the worker hears `Lost`
    messages    TokenDelta and Finish go to the attempt with that request id; when nobody waits for it any more they are
                late: dropped, and answered with Abort so that the worker stops
    farewell    the worker has drained and said all: answered with Goodbye, and no request is sent to it any more
    retired     its address is no longer listed: no new request goes there, and after the last one it is forgotten
    unknown     a worker that keeps reporting no requests at all, though it was sent one, has dropped it: `Lost` as well

Everything runs on one asyncio loop; time is the clock passed in.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import msgspec

from encoder.types import Farewell, Goodbye
from epd.errors import StageUnavailable
from epd.router.attempts import Attempt, Lost, Worker
from epd.router.pairing import choose_all, has_partners, what_is_missing
from epd.router.policy import prefix_affinity
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

# Heartbeats over which all workers of an attempt must report that they hold nothing before the attempt counts as
# dropped: KV may be on its way between two workers, held by neither.
_UNKNOWN_HEARTBEATS = 8
_LONG_STAND_S = 1.0


class Fleet:
    """All workers of one gateway. Without a decode stage the `prefill` workers do both. Workers may join and leave."""

    def __init__(
        self,
        *,
        prefill: Sequence[Channel],
        decode: Sequence[Channel],
        heartbeat_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        has_decode: bool | None = None,
        model: str | None = None,
    ) -> None:
        """`has_decode` says whether there is a decode stage, though none of its workers may be known yet; None looks.

        Workers of another `model` get no requests.
        """
        has_decode = bool(decode) if has_decode is None else has_decode
        self.roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE) if has_decode else (Role.BOTH,)
        """The stages a request passes, in order."""
        self._model = model
        self.workers: list[Worker] = []
        self.num_late_messages = 0
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._sequence = 0
        self._ticked_s = clock()
        self._waits = True
        self._changed = asyncio.Event()
        self._late: OrderedDict[str, None] = OrderedDict()
        self._beating: asyncio.Task[None] | None = None
        self._listening: dict[Worker, asyncio.Task[None]] = {}
        self._sends: set[asyncio.Task[None]] = set()
        for channel in prefill:
            self.add(channel, self.roles[0])
        for channel in decode:
            self.add(channel, Role.DECODE)

    def of_role(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    def max_context_tokens(self) -> int | None:
        """The smallest context among the workers that have answered; None before the first answer."""
        return min((worker.info.max_context_tokens for worker in self.workers if worker.info is not None), default=None)

    def start(self) -> None:
        """Open the channels and begin listening; call inside the running loop."""
        self._beating = asyncio.create_task(self._beat(), name="worker heartbeat")
        for worker in self.workers:
            self._open(worker)

    async def stop(self) -> None:
        """Hand over what is being sent, then close the channels."""
        if self._sends:
            await asyncio.wait(self._sends, timeout=1.0)
        tasks = [*self._listening.values(), *([] if self._beating is None else [self._beating])]
        for task in tasks:
            task.cancel()
        for worker in self.workers:
            worker.channel.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, channel: Channel, role: Role) -> None:
        """A worker joins; one of this address that was retired is back, and keeps its old channel."""
        for worker in self.workers:
            if (worker.address, worker.role) == (channel.address, role):
                worker.is_retired = False
                channel.close()
                self._wake_waiters()
                return
        worker = Worker(channel, role, model=self._model, clock=self._clock)
        self.workers.append(worker)
        if self._beating is not None:
            self._open(worker)

    def retire(self, address: str, role: Role) -> None:
        """No new request goes to the worker. It is forgotten once it holds none of this gateway's."""
        for worker in self.workers:
            if (worker.address, worker.role) == (address, role):
                worker.is_retired = True

    def stop_waiting(self) -> None:
        """From now on a stage that is down ends a request at once: this gateway stops, and so may everything else."""
        self._waits = False
        self._wake_waiters()

    async def submit(self, request: GenerateRequest, *, give_up_s: float, avoid: Collection[str] = ()) -> Attempt:
        """Choose workers, waiting for a stage that is down until the clock reads `give_up_s`, and send the request.

        Raises StageUnavailable.
        """
        affinity, request_id = prefix_affinity(request), request.request_id
        for sending in itertools.count(1):
            if sending > 1:
                # One of the workers may know the id already, and that it has ended: what it heard of it again would be
                # dropped.
                request = msgspec.structs.replace(request, request_id=f"{request_id}.{sending}")
            chosen = await self._chosen(give_up_s, affinity, avoid)
            attempt = Attempt(request.request_id, chosen, sent_at=self._sequence)
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
        raise AssertionError("there is always another number")

    def close(self, attempt: Attempt) -> None:
        """Forget the attempt; workers that did not end it themselves are told to stop. May be called twice."""
        for worker in attempt.workers:
            if worker.attempts.pop(attempt.request_id, None) is not None and worker is not attempt.finished_by:
                self._post(worker, Abort(request_id=attempt.request_id))

    def tick(self) -> None:
        """One heartbeat: greet every worker, and give up those that have been silent too long."""
        self._sequence += 1
        now = self._clock()
        # Silence counts only while this loop runs: what came while it stood still is in the sockets, not yet read.
        stood_still_s = now - self._ticked_s - self._heartbeat_s
        if stood_still_s > 0:
            if stood_still_s > _LONG_STAND_S:
                logger.warning("the gateway stood still for %.1f s", stood_still_s)
            for worker in self.workers:
                worker.last_heard_s += stood_still_s
        self._ticked_s = now
        for worker in [worker for worker in self.workers if worker.is_retired and not worker.attempts]:
            self._forget(worker)
        for worker in self.workers:
            if not worker.channel.connected:
                continue
            if worker.info is not None and now - worker.last_heard_s > self._timeout_s:
                self._lose(worker, f"silent for {now - worker.last_heard_s:.1f} s")
                worker.is_silent = True
            self._post(worker, Hello(sequence=self._sequence))

    def why_not_ready(self, worker: Worker) -> str | None:
        """None when the worker takes requests and there is one to hand KV to or to get it from; else a reason for
        people."""
        reason = worker.why_not_ready()
        if reason is not None or has_partners(worker, self.workers, self.roles):
            return reason
        others = ", ".join(role for role in self.roles if role is not worker.role)
        return (
            f"{worker.address}: no {others} worker holds KV as this one does (page_size, dtype, weights, window_left, "
            "qkv_layout, draft_tokens or the checkpoint differ)"
        )

    async def _chosen(self, give_up_s: float, affinity: int, avoid: Collection[str]) -> tuple[Worker, ...]:
        while True:
            changed = self._changed
            workers = choose_all(self.workers, self.roles, affinity=affinity, avoid=avoid)
            if workers is not None:
                return workers
            left_s = give_up_s - self._clock()
            if left_s <= 0 or not self._waits:
                raise StageUnavailable(what_is_missing(self.workers, self.roles), retry_after_s=5.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

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
            Submit(
                request=request,
                decode_address=info.address,
                decode_incarnation=info.incarnation,
                kv_fingerprint=info.kv_fingerprint or None,
            )
        )

    def _open(self, worker: Worker) -> None:
        worker.channel.on_connect = lambda: self._connected(worker)
        worker.channel.on_disconnect = lambda: self._lose(worker, "connection lost")
        worker.channel.open()
        self._listening[worker] = asyncio.create_task(self._listen(worker), name=f"listen {worker.address}")

    def _forget(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.channel.on_connect = worker.channel.on_disconnect = None
        # Who listens hears that the channel is closed.
        worker.channel.close()
        self._listening.pop(worker, None)

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
        worker.last_heard_s, worker.is_silent = self._clock(), False
        match message:
            case WorkerInfo():
                self._informed(worker, message)
            case TokenDelta():
                self._deliver(worker, message)
            case Finish():
                self._deliver(worker, message)
            case KvRefused(request_id=request_id, message=text):
                self._deliver(worker, _refusal(request_id, text))
            case Farewell(sequence=sequence):
                self._set_unready(worker)
                self._post(worker, Goodbye(sequence=sequence))

    def _informed(self, worker: Worker, info: WorkerInfo) -> None:
        before = worker.info
        if before is not None and before.incarnation != info.incarnation:
            self._lose(worker, "restarted")
        was_ready = worker.ready
        worker.info = info
        if worker.ready != was_ready:
            self._wake_waiters()
        for attempt in worker.attempts.values():
            self._look_for(attempt, worker)

    def _look_for(self, attempt: Attempt, worker: Worker) -> None:
        """Tell the attempt that it is lost when its workers have been saying for a while that they hold nothing.

        A worker answers in order: had it finished the request, the Finish would have come before this report.
        """
        reports = [holder.idle_at for holder in attempt.workers]
        if attempt.finished_by is not None or any(at is None or at <= attempt.sent_at for at in reports):
            attempt.unknown_from = None
            return
        latest = min(at for at in reports if at is not None)
        if attempt.unknown_from is None:
            attempt.unknown_from = latest
        elif latest - attempt.unknown_from >= _UNKNOWN_HEARTBEATS:
            attempt.unknown_from = None
            logger.warning("request %s: no worker knows it any more", attempt.request_id)
            attempt.put(Lost(worker.address, "does not know the request any more"))

    def _deliver(self, worker: Worker, event: TokenDelta | Finish) -> None:
        attempt = worker.attempts.get(event.request_id)
        if attempt is None:
            self._late_message(worker, event)
            return
        attempt.unknown_from = None
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
            self._set_unready(worker)
            self._post(worker, Hello(sequence=self._sequence))

    def _set_unready(self, worker: Worker) -> None:
        if worker.info is not None:
            worker.info = msgspec.structs.replace(worker.info, ready=False)

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
        worker.info, worker.is_silent = None, False
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
