"""A request as it lies with its workers, and a worker as the gateway sees it. The rules are in `workers`."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from epd.router.policy import WorkerLoad
from epd.transport.base import Channel
from epd.types import Finish, Role, TokenDelta, WorkerInfo


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that held the attempt is gone."""

    worker: str
    reason: str


Event = TokenDelta | Finish | Lost


class Attempt:
    """The mailbox of one submitted request. Closed by `Fleet.close`, exactly once, by whoever opened it.

    `handed_over` is set by the first word of the decode worker: from then on the prefill worker may die.
    `sent_at` is the heartbeat after which the request was sent; `unknown_from` the first heartbeat whose answers said
    that nobody holds it, None while somebody does.
    """

    def __init__(self, request_id: str, workers: "tuple[Worker, ...]", *, sent_at: int) -> None:
        self.request_id = request_id
        self.workers = workers
        self.sent_at = sent_at
        self.unknown_from: int | None = None
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
    """One engine process. `info` is None until it answered on the present connection.

    `is_retired` takes no new requests: its address is no longer listed. `model` is the one it must serve, if any.
    `is_silent` had answered, and was lost because it did so no more. `last_heard_s` is on `clock`; 0 means never.
    """

    channel: Channel
    role: Role
    info: WorkerInfo | None = None
    last_heard_s: float = 0.0
    attempts: dict[str, Attempt] = field(default_factory=dict)
    model: str | None = None
    is_retired: bool = False
    is_silent: bool = False
    clock: Callable[[], float] = time.monotonic

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def idle_at(self) -> int | None:
        """The heartbeat at which the worker last said that it holds no request; None when it holds some."""
        info = self.info
        return info.sequence if info is not None and info.num_running + info.num_waiting == 0 else None

    @property
    def ready(self) -> bool:
        info = self.info
        is_able = self.channel.connected and info is not None and info.ready
        return is_able and not self.is_retired and self._why_wrong() is None

    def _why_wrong(self) -> str | None:
        """What is wrong with who answers at this address; None if nothing is."""
        if self.info is None:
            return None
        if self.info.role is not self.role:
            return f"is a {self.info.role} worker, not a {self.role} worker"
        if self.model is not None and self.info.model != self.model:
            return f"serves {self.info.model}, not {self.model}"
        return None

    def why_not_ready(self) -> str | None:
        """None when ready, else a reason for people."""
        if not self.channel.connected:
            if self.channel.is_refused:
                return f"{self.address}: refuses this process: another cluster key?"
            return f"{self.address}: {self._silence() if self.channel.is_silent else 'not connected'}"
        if self.info is None:
            return f"{self.address}: {self._silence() if self.is_silent else 'has not answered yet'}"
        if (wrong := self._why_wrong()) is not None:
            return f"{self.address}: {wrong}"
        if self.is_retired:
            return f"{self.address}: no longer listed"
        if self.info.ready:
            return None
        return f"{self.address}: takes no new work, because it is shutting down or has just handed a request back"

    def _silence(self) -> str:
        if not self.last_heard_s:
            return "does not answer"
        return f"does not answer, for {self.clock() - self.last_heard_s:.0f} s now"

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
