"""Whether the deployment is healthy and ready: facts noted by the loop that works, read by the thread that answers.

    health   200 while at least one replica can be used, and the front's own loop runs; else 503 and why, by replica
    ready    200 when every replica can be used and nothing is being stopped; else 503 and what is missing

A replica can be used when it is up, its tower is not stuck and no other process keeps its embeddings locked. Load
makes neither red: a full queue is no fault.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from encoder.types import ARENA_STUCK_AFTER_S, EncoderInfo

# The loop that works notes its pulse several times a second; silent for this long it is stuck, not busy.
STUCK_AFTER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to a probe."""

    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Facts:
    pulse_s: float
    troubles: Mapping[str, str]
    """By replica, why it cannot be used."""
    num_replicas: int
    draining: bool


class HealthBoard:
    """`note` belongs to the loop that works; the rest may be called from any thread: facts are replaced as a whole."""

    def __init__(self, addresses: tuple[str, ...], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names = {address: _short(address) for address in addresses}
        self._facts = _Facts(
            pulse_s=clock(),
            troubles=dict.fromkeys(self._names.values(), "not up"),
            num_replicas=len(addresses),
            draining=False,
        )

    def note(self, infos: Mapping[str, EncoderInfo | None], *, draining: bool) -> None:
        """The loop runs, and this is what it knows of the replicas, by address."""
        troubles = {}
        for address, info in infos.items():
            if info is not None:
                self._names[address] = info.replica
            trouble = trouble_of(info)
            if trouble is not None:
                troubles[self._names.get(address, address)] = trouble
        self._facts = _Facts(self._clock(), troubles, len(infos), draining)

    def health(self) -> Verdict:
        """Whether anything can be served at all."""
        facts = self._facts
        silent_s = self._clock() - facts.pulse_s
        if silent_s > STUCK_AFTER_S:
            return Verdict(503, {"status": "unhealthy", "front": f"its event loop has not run for {silent_s:.0f} s"})
        if len(facts.troubles) >= facts.num_replicas:
            return Verdict(503, {"status": "unhealthy", "replicas": facts.troubles})
        return Verdict(200, {"status": "ok"})

    def ready(self) -> Verdict:
        """Whether everything that was asked for is there."""
        facts = self._facts
        health = self.health()
        if facts.draining:
            return Verdict(503, {"status": "draining"})
        if "front" in health.body:
            return health
        if facts.troubles:
            return Verdict(503, {"status": "waiting", "waiting_for": {"encoder": facts.troubles}})
        return Verdict(200, {"status": "ready"})


def trouble_of(info: EncoderInfo | None) -> str | None:
    """Why a replica cannot be used; None when it can."""
    if info is None or not info.ready:
        return "not up"
    if info.wedged:
        return f"its tower has been at one batch for {info.tower_busy_s:.0f} s"
    if info.arena_locked_s > ARENA_STUCK_AFTER_S:
        return f"another process has kept its embeddings locked for {info.arena_locked_s:.0f} s"
    return None


def _short(address: str) -> str:
    """ipc:///tmp/mimo-x/encoder-0 is encoder-0: the directory of a run is nobody's business."""
    return address.rpartition("/")[2] if address.startswith(("ipc://", "inproc://")) else address
