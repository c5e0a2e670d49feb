"""The step of a worker: receive -> admit -> plan -> run -> commit -> reply."""

import logging
import threading
from collections import deque

from encoder.types import Goodbye
from epd.engine.clock import Clock
from epd.engine.departure import Departure
from epd.engine.desk import HandoffDesk, Outcome, Ready, Refused
from epd.engine.feed import RowSupply
from epd.engine.handoff import KvMover, size_bytes
from epd.engine.identity import WorkerIdentity
from epd.engine.peers import PeerWatch
from epd.engine.plan import Failure, HeldTransfer, StepPlan, finish_of
from epd.engine.report import worker_info
from epd.engine.runner import Runner
from epd.engine.scheduler import Scheduler
from epd.engine.sequence import Sequence
from epd.engine.staging import KvStager
from epd.engine.tiers import Tiers
from epd.kv.copies import CopyFailed
from epd.transport.base import Endpoint, Message, Peer, PeerUnreachable, Received
from epd.types import (
    Abort,
    ExpectKv,
    Finish,
    FinishReason,
    GenerateRequest,
    Hello,
    KvRefused,
    KvTransfer,
    Role,
    Submit,
    TokenDelta,
    Usage,
    WorkerInfo,
)

logger = logging.getLogger(__name__)

# How long an idle worker sleeps between looks at deadlines and silent gateways; a message wakes it at once, and so do
# embedding rows that were waited for.
_IDLE_WAIT_S = 0.2
# The same while KV is on its way between the tiers: most of it wakes the loop when it is there, but copies on a device
# do not, and what waits for the store has a deadline.
_TRANSIT_WAIT_S = 0.005
# When work is there but nothing can be planned (pages are held for a moment): no busy loop.
_STALLED_WAIT_S = 0.002


class EngineLoop:
    """One worker's thread of control; all below it is single-threaded. `stop` and `drain` may come from outside."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        endpoint: Endpoint,
        scheduler: Scheduler,
        runner: Runner,
        mover: KvMover,
        tiers: Tiers,
        stager: KvStager,
        feed: RowSupply,
        clock: Clock,
        peer_timeout_s: float,
        max_waiting: int,
    ) -> None:
        self._identity = identity
        self._endpoint = endpoint
        self._scheduler = scheduler
        self._runner = runner
        self._mover = mover
        self._tiers = tiers
        self._cache = tiers.cache
        self._stager = stager
        self._feed = feed
        self._clock = clock
        self._desk = HandoffDesk(orphan_timeout_s=peer_timeout_s, max_orphans=max_waiting)
        self._peers = PeerWatch(timeout_s=peer_timeout_s)
        self._departure = Departure(timeout_s=peer_timeout_s)
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._inbox: deque[Received] = deque()
        self._dispatched: Received | None = None
        self._plan = StepPlan()
        self._handoff_bytes = 0
        self._failed_steps = 0

    @property
    def num_expected(self) -> int:
        """Requests announced whose KV has not come."""
        return self._desk.num_expected

    @property
    def num_orphans(self) -> int:
        """Transfers nobody has announced."""
        return self._desk.num_orphans

    def run(self) -> None:
        """Step until `stop`, or until a drain has finished and the gateways have read the last answers. This is the
        outermost loop of a worker: a step that raises ends the requests it was about and the worker goes on. At its end
        the store gets what is still on its way there, within seconds."""
        try:
            self._run()
        finally:
            self._feed.close()
            self._runner.close()
            self._tiers.close()

    def stop(self) -> None:
        """End `run` after the step at hand. Any thread or signal handler."""
        self._stop.set()
        self._endpoint.wake()

    def drain(self) -> None:
        """Finish what runs, refuse the rest as retryable, then end `run`. Any thread or signal handler."""
        self._drain.set()
        self._endpoint.wake()

    def step(self, wait_s: float = 0.0) -> float:
        """One step; returns how long the next one may wait for a message."""
        self._plan = StepPlan()
        self._inbox.extend(self._endpoint.receive(wait_s))
        self._cache.poll()
        self._admit()
        self._plan = self._scheduler.plan()
        if not self._plan.is_empty:
            self._compute()
        self._hand_over()
        self._reply()
        if self._scheduler.is_asleep:
            return _TRANSIT_WAIT_S if self._cache.next_event_pending else _IDLE_WAIT_S
        return _STALLED_WAIT_S if self._plan.is_empty else 0.0

    def _compute(self) -> None:
        started_s = self._clock.monotonic_s()
        try:
            result = self._runner.run(self._plan)
        except CopyFailed:
            self._scheduler.undo(self._plan)
        else:
            self._scheduler.commit(self._plan, result)
            self._scheduler.measures.stepped(self._plan, self._clock.monotonic_s() - started_s)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.is_set():
            try:
                wait_s = self.step(wait_s)
            except Exception:
                if self._dispatched is None and self._plan.is_empty:
                    # Not about any request: the worker itself is broken, and its supervisor starts another.
                    raise
                logger.exception("a step failed; ending the requests it was about")
                self._fail_step()
                wait_s = 0.0
            if self._scheduler.is_draining and self._scheduler.is_idle and not self._inbox and self._part():
                return

    def check(self) -> None:
        """Raise PageStateError unless the books balance; with nothing running nothing may be leased."""
        self._cache.check()

    # -- receive and admit ----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._drain.is_set() and not self._scheduler.is_draining:
            self._begin_drain()
        now_s = self._clock.monotonic_s()
        while self._inbox:
            self._dispatched = self._inbox.popleft()
            is_gateway = isinstance(self._dispatched.message, Submit | ExpectKv | Hello)
            self._peers.heard(self._dispatched.peer, now_s, is_new=is_gateway)
            self._dispatch(self._dispatched)
        self._dispatched = None
        for peer in self._peers.take_silent(now_s):
            self._end_silent(peer)
        self._desk.expire(now_s, self._clock.unix_s())

    def _dispatch(self, item: Received) -> None:
        match item.message:
            case Submit():
                self._submit(item.peer, item.message)
            case Abort(request_id=request_id):
                self._abort(item.peer, request_id)
            case Hello(sequence=sequence):
                self._send(item.peer, self._info(sequence))
            case ExpectKv(request=request):
                self._expect(item.peer, request)
            case KvTransfer():
                self._arrive(item.peer, HeldTransfer(item.message, item.tensors))
            case Goodbye(sequence=sequence):
                self._departure.answered(item.peer, sequence)
            case KvRefused(request_id=request_id, message=message):
                logger.warning("decode worker %s refused the KV of %s: %s", item.peer, request_id, message)
            case _:
                logger.warning("peer %s sent a %s, which is not for workers", item.peer, type(item.message).__name__)

    def _submit(self, peer: Peer, message: Submit) -> None:
        request, role = message.request, self._identity.role
        if role is Role.DECODE or (role is Role.PREFILL) != (message.decode_address is not None):
            why = f"a {role} worker cannot take a prompt for decode worker {message.decode_address}"
            self._refuse(peer, request, why)
            return
        if message.kv_fingerprint not in (None, self._mover.fingerprint):
            differ = f"{message.decode_address} holds KV as {message.kv_fingerprint}, not {self._mover.fingerprint}"
            self._refuse(peer, request, f"decode worker {differ}, as this worker does", code="kv_layout")
            return
        if request.request_id in self._scheduler:
            logger.warning("request %s was submitted twice; the second is ignored", request.request_id)
            return
        if message.decode_address is not None:
            self._endpoint.connect(message.decode_address)
        sequence = Sequence(request=request, peer=peer, arrival_s=self._clock.monotonic_s())
        sequence.decode_address = message.decode_address
        sequence.decode_incarnation = message.decode_incarnation
        self._scheduler.submit(sequence)

    def _expect(self, peer: Peer, request: GenerateRequest) -> None:
        if self._identity.role is not Role.DECODE:
            self._refuse(peer, request, f"a {self._identity.role} worker takes no KV from others")
        elif self._scheduler.is_draining:
            self._end(peer, request, Failure(503, "draining", "this worker is shutting down", retryable=True))
        else:
            self._settle(self._desk.expect(request, peer, self._clock.monotonic_s()))

    def _arrive(self, peer: Peer, held: HeldTransfer) -> None:
        transfer = held.transfer
        refusal = self._mover.refusal(held, max_first_window_page=self._cache.window_frontier(transfer.num_tokens))
        if transfer.incarnation != self._identity.incarnation:
            refusal = f"KV was sent to incarnation {transfer.incarnation}, this is {self._identity.incarnation}"
        elif self._identity.role is not Role.DECODE:
            refusal = f"a {self._identity.role} worker takes no KV from others"
        if refusal is not None:
            logger.warning("refusing the KV of %s: %s", transfer.request_id, refusal)
            self._send(peer, KvRefused(request_id=transfer.request_id, message=refusal))
        self._handoff_bytes += size_bytes(held)
        self._settle(self._desk.arrive(held, refusal, self._clock.monotonic_s()))

    def _settle(self, outcome: Outcome) -> None:
        match outcome:
            case Ready(expected=expected, held=held):
                arrival_s = self._clock.monotonic_s()
                sequence = Sequence(request=expected.request, peer=expected.peer, arrival_s=arrival_s)
                if held.transfer.num_tokens != sequence.num_prompt:
                    why = f"KV of {held.transfer.num_tokens} tokens came for a prompt of {sequence.num_prompt}"
                    self._end(expected.peer, expected.request, Failure(500, "kv_mismatch", why, retryable=True))
                    return
                self._scheduler.submit_transfer(sequence, held)
            case Refused(expected=expected, message=why):
                refused = None if why is None else Failure(503, "kv_refused", why, retryable=True)
                self._end(expected.peer, expected.request, refused)

    def _abort(self, peer: Peer, request_id: str) -> None:
        if request_id in self._scheduler:
            self._scheduler.abort(request_id)
        elif self._identity.role is Role.DECODE:
            owner = self._desk.owner(request_id)
            self._desk.abort(request_id, self._clock.monotonic_s(), by_gateway=owner is None or owner == peer)

    def _begin_drain(self) -> None:
        logger.info("draining: %d running, %d waiting", self._scheduler.num_running, self._scheduler.num_waiting)
        self._scheduler.drain()
        failure = Failure(503, "draining", "this worker is shutting down", retryable=True)
        for expected in self._desk.take_all(self._clock.monotonic_s()):
            self._end(expected.peer, expected.request, failure)

    def _part(self) -> bool:
        """After a drain: say farewell to whoever has not read everything yet; whether the worker may end.

        Until it does it goes on receiving, and refuses what still comes.
        """
        now_s = self._clock.monotonic_s()
        for peer, farewell in self._departure.farewells(now_s):
            self._send(peer, farewell)
        if self._departure.is_all_read:
            # A gateway that was never answered may have just sent its first request.
            self._inbox.extend(self._endpoint.receive(0.0))
            return not self._inbox
        return self._departure.has_waited(now_s)

    def _end_silent(self, peer: Peer) -> None:
        """End the requests of a gateway that says nothing. It may only be stalled: then it reads the Finishes when it
        goes on, and its clients get an answer or an error instead of a stream that hangs."""
        message = f"worker {self._identity.name} had not heard from this gateway for too long and let the request go"
        failure = Failure(503, "gateway_silent", message, retryable=True)
        expected = self._desk.drop_peer(peer, self._clock.monotonic_s())
        if num_ended := self._scheduler.drop_peer(peer, failure) + len(expected):
            logger.warning("gateway %s fell silent; %d requests of it are ended", peer, num_ended)
        for one in expected:
            self._end(peer, one.request, failure)

    def _lose(self, peer: Peer, error: PeerUnreachable) -> None:
        """Free what belongs to a peer that cannot be reached: its streams have a hole now."""
        now_s = self._clock.monotonic_s()
        self._peers.lose(peer, now_s)
        self._departure.forget(peer)
        num_dropped = self._scheduler.drop_peer(peer) + len(self._desk.drop_peer(peer, now_s))
        level = logging.WARNING if num_dropped else logging.DEBUG
        logger.log(level, "%s; %d requests of it dropped", error, num_dropped)

    # -- hand over and reply --------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        for sequence in self._scheduler.take_handoffs():
            self._scheduler.handed_over(sequence, self._send_kv(sequence))

    def _send_kv(self, sequence: Sequence) -> Failure | None:
        """Send the prompt's KV to the decode worker; a Failure when it cannot be reached."""
        assert sequence.decode_address is not None
        held = self._mover.transfer(
            sequence.page_table(),
            request_id=sequence.request_id,
            incarnation=sequence.decode_incarnation or "",
            num_tokens=sequence.num_prompt,
            first_token=sequence.token_ids[-1],
            first_window_page=self._cache.window_frontier(sequence.num_prompt),
            usage=sequence.usage(),
            timings=sequence.timings(self._clock.monotonic_s()),
            first_token_unix_s=sequence.first_token_unix_s(self._clock),
            tail=sequence.draft_tail,
        )
        try:
            self._endpoint.send_to(sequence.decode_address, held.transfer, held.tensors)
        except PeerUnreachable as error:
            return Failure(503, "decode_unreachable", str(error), retryable=True)
        self._handoff_bytes += size_bytes(held)
        return None

    def _reply(self) -> None:
        for reply in self._scheduler.take_replies():
            self._send(reply.peer, reply.message)

    def _send(self, peer: Peer, message: Message) -> None:
        """Send; to a peer that is lost nothing more is said until it is heard again."""
        if self._peers.is_lost(peer):
            return
        if peer.address is None and isinstance(message, TokenDelta | Finish):
            self._departure.spoke(peer)
        try:
            self._endpoint.send(peer, message)
        except PeerUnreachable as error:
            if peer.address is None:
                self._lose(peer, error)
            else:
                logger.debug("%s", error)

    def _refuse(self, peer: Peer, request: GenerateRequest, message: str, *, code: str = "wrong_role") -> None:
        """For what no further attempt would change."""
        self._end(peer, request, Failure(500, code, message))

    def _end(self, peer: Peer, request: GenerateRequest, failure: Failure | None) -> None:
        """The Finish of a request the scheduler never had. Without a failure it was cancelled."""
        usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=0)
        reason = FinishReason.CANCELLED if failure is None else FinishReason.FAILED
        self._send(peer, finish_of(request.request_id, reason, usage, failure))

    def _fail_step(self) -> None:
        """After a step that raised: end the request whose message it was about, or the requests of its plan."""
        self._failed_steps += 1
        failure = Failure(500, "step_failed", "the worker failed on this request; its log says why")
        dispatched, self._dispatched = self._dispatched, None
        request_ids = self._plan.request_ids
        if dispatched is not None and isinstance(dispatched.message, Submit | ExpectKv):
            request = dispatched.message.request
            if request.request_id in self._scheduler:
                request_ids = (*request_ids, request.request_id)
            else:
                self._end(dispatched.peer, request, failure)
        self._scheduler.fail(request_ids, failure)
        self._reply()

    def _info(self, sequence: int) -> WorkerInfo:
        return worker_info(
            self._identity,
            self._cache.stats(),
            self._scheduler.counters,
            sequence=sequence,
            address=self._endpoint.address,
            kv_fingerprint=self._mover.fingerprint,
            num_waiting=self._scheduler.num_waiting + self._desk.num_orphans,
            num_running=self._scheduler.num_running,
            ready=not self._drain.is_set(),
            page_size=self._cache.page_size,
            copies=self._tiers.copies(),
            bridge=self._tiers.transfers(),
            histograms=tuple(self._scheduler.measures.told()),
            balance=tuple(self._runner.balance.told()),
            others={
                "handoff_bytes": self._handoff_bytes,
                "unstaged_transfers": self._stager.num_unstaged,
                "dropped_transfers": self._desk.num_dropped,
                "dropped_messages": self._endpoint.num_dropped,
                "failed_steps": self._failed_steps,
                "embedding_bytes": self._feed.held_bytes,
            },
        )
