"""Decode's front desk: joins what the gateway announced with the KV that prefill sent, in whichever order they come.

    expected   ExpectKv is here, the KV is not          ready    both are here: leaves the desk
    orphan     the KV is here, ExpectKv is not          closed   ended: what still comes for it is answered or dropped

An expectation holds no Finish: until the KV is here the prefill worker owns the request and ends it. So an abort
forgets an expectation silently; should the KV come all the same, the desk gives the cancelled Finish that is then due.
Only a worker that ends its expectations by itself (shutting down, or missing their gateway) says so for each of them.
"""

from dataclasses import dataclass

from epd.engine.plan import HeldTransfer
from epd.transport.base import Peer
from epd.types import GenerateRequest

# How long a request that ended is remembered, and how long an expectation outlives its deadline.
_CLOSED_S = 60.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A request announced by `peer`; the transfer's deltas go there."""

    request: GenerateRequest
    peer: Peer
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    expected: Expected
    held: HeldTransfer


@dataclass(frozen=True, slots=True)
class Refused:
    """The transfer cannot be used and the gateway must hear so. `message` None: it was cancelled."""

    expected: Expected
    message: str | None


@dataclass(frozen=True, slots=True)
class _Closed:
    """`expected` when a Finish is due to it should KV come; `refusal` when one is due should ExpectKv come."""

    until_s: float
    expected: Expected | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class _Orphan:
    held: HeldTransfer
    arrival_s: float


Outcome = Ready | Refused | None


class HandoffDesk:
    """Single-threaded; times are monotonic seconds passed in. Holds at most `max_orphans` unannounced transfers."""

    def __init__(self, *, orphan_timeout_s: float, max_orphans: int) -> None:
        self._orphan_timeout_s = orphan_timeout_s
        self._max_orphans = max_orphans
        self._expected: dict[str, Expected] = {}
        self._orphans: dict[str, _Orphan] = {}
        self._closed: dict[str, _Closed] = {}
        self.num_dropped = 0

    @property
    def num_expected(self) -> int:
        return len(self._expected)

    @property
    def num_orphans(self) -> int:
        return len(self._orphans)

    def expect(self, request: GenerateRequest, peer: Peer, now_s: float) -> Outcome:
        """The gateway announces a request."""
        request_id = request.request_id
        expected = Expected(request, peer, now_s)
        closed = self._closed.get(request_id)
        if closed is not None:
            refused = None if closed.refusal is None else Refused(expected, closed.refusal)
            self._close(request_id, now_s)
            return refused
        orphan = self._orphans.pop(request_id, None)
        if orphan is not None:
            self._close(request_id, now_s)
            return Ready(expected, orphan.held)
        self._expected.setdefault(request_id, expected)
        return None

    def arrive(self, held: HeldTransfer, refusal: str | None, now_s: float) -> Outcome:
        """A transfer came; `refusal` says why it cannot be used here, if so."""
        request_id = held.transfer.request_id
        closed = self._closed.get(request_id)
        if closed is not None:
            self.num_dropped += 1
            self._close(request_id, now_s)
            return None if closed.expected is None else Refused(closed.expected, None)
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._close(request_id, now_s)
            return Ready(expected, held) if refusal is None else Refused(expected, refusal)
        if refusal is not None:
            self._close(request_id, now_s, refusal=refusal)
        elif len(self._orphans) >= self._max_orphans:
            self.num_dropped += 1
            self._close(request_id, now_s, refusal="this worker holds too many transfers nobody announced")
        else:
            self._orphans[request_id] = _Orphan(held, now_s)
        return None

    def abort(self, request_id: str, now_s: float, *, by_gateway: bool) -> None:
        """Forget a request that is not ready yet. `by_gateway` False: prefill ended it, so no KV will come."""
        expected = self._expected.pop(request_id, None)
        self._orphans.pop(request_id, None)
        self._close(request_id, now_s, expected=expected if by_gateway else None)

    def owner(self, request_id: str) -> Peer | None:
        """Who announced a request that is still expected."""
        expected = self._expected.get(request_id)
        return None if expected is None else expected.peer

    def drop_peer(self, peer: Peer, now_s: float) -> list[Expected]:
        """Forget everything a gateway announced, and return it. KV that still comes for it is dropped silently."""
        dropped = [expected for expected in self._expected.values() if expected.peer == peer]
        for expected in dropped:
            del self._expected[expected.request.request_id]
            self._close(expected.request.request_id, now_s)
        return dropped

    def take_all(self, now_s: float) -> list[Expected]:
        """Forget every expectation, and return them: the worker is shutting down."""
        taken = list(self._expected.values())
        for request_id in list(self._expected):
            self._close(request_id, now_s)
        self._expected.clear()
        self._orphans.clear()
        return taken

    def expire(self, now_s: float, now_unix_s: float) -> None:
        """Drop orphans nobody announced in time, expectations long past their deadline, and old memories."""
        for request_id in [k for k, v in self._orphans.items() if now_s - v.arrival_s > self._orphan_timeout_s]:
            del self._orphans[request_id]
            self.num_dropped += 1
            self._close(request_id, now_s, refusal="the transfer waited too long to be announced")
        overdue = [k for k, v in self._expected.items() if now_unix_s > v.request.deadline_unix_s + _CLOSED_S]
        for request_id in overdue:
            del self._expected[request_id]
            self._close(request_id, now_s)
        for request_id in [key for key, closed in self._closed.items() if closed.until_s < now_s]:
            del self._closed[request_id]

    def _close(
        self, request_id: str, now_s: float, *, expected: Expected | None = None, refusal: str | None = None
    ) -> None:
        self._closed[request_id] = _Closed(now_s + _CLOSED_S, expected, refusal)
