"""A request as it lies with its workers, and a worker as the gateway sees it. The rules are in `workers`."""

import asyncio
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
    def idle_at(self) -> int | None:
        """The heartbeat at which the worker last said that it holds no request; None when it holds some."""
        info = self.info
        return info.sequence if info is not None and info.num_running + info.num_waiting == 0 else None

    @property
    def ready(self) -> bool:
        return self.channel.connected and self.info is not None and self.info.ready

    def why_not_ready(self) -> str | None:
        """None when ready, else a reason for people."""
        if not self.channel.connected:
            return f"{self.address}: not connected"
        if self.info is None:
            return f"{self.address}: has not answered yet"
        if self.info.ready:
            return None
        return f"{self.address}: takes no new work, because it is shutting down or has just handed a request back"

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
