"""`GET /v1/pipeline`: every process of every stage as the gateway knows it now, and the last requests.

The stages are read from what their processes said last (twice a second), so asking costs them nothing. The numbers are
of all clients together; of the requests, a client sees those of its own API key.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from aiohttp import web

from encoder.types import EncoderInfo
from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.admission import Admission
from epd.gateway.answer_shapes import AnswerShape, NonNegative, ReceiptAnswer, Seconds
from epd.gateway.media import Encoder
from epd.gateway.metrics import STAGE_OF_ROLE
from epd.gateway.operations import Answer, Operation, Parameter
from epd.gateway.owner import owner_of
from epd.gateway.recent import RecentRequests
from epd.gateway.validation import shown
from epd.router.attempts import Worker
from epd.router.workers import Fleet

_TIERS = ("l1", "l2", "l3", "healed")
# Of the many counters of a process, those that say how it fares; /metrics has them all.
_ENCODER_COUNTERS = (
    "encoded",
    "hits",
    "joined",
    "recalled",
    "failed",
    "batches",
    "batch_jobs",
    "tower_s",
    "process_resident_bytes",
)
_WORKER_COUNTERS = (
    "steps",
    "batched_sequences",
    "largest_batch",
    "prompt_tokens",
    "generated_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "retractions",
    "finished",
    "failed",
    "handoff_bytes",
    "process_resident_bytes",
)


class PoolView(AnswerShape):
    """Memory of one process or host: `free`, `cached` (kept for later requests, given up when room is short) and
    `leased` (in use) add up to `total`."""

    pool: Literal["full", "window", "embeddings"]
    unit: Literal["pages", "bytes"]
    total: NonNegative
    free: NonNegative
    cached: NonNegative
    leased: NonNegative


class TierTokens(AnswerShape):
    """Prompt tokens since the process started, by where their KV was: on the device, in the host's memory, in the
    store; those run again to restore windows; and those computed."""

    l1: NonNegative
    l2: NonNegative
    l3: NonNegative
    healed: NonNegative
    computed: NonNegative


class ProcessView(AnswerShape):
    """`reason` says why a process is not ready. A request counts as `waiting` or as `running`; encoders count media,
    and those that wait among the running ones."""

    name: str
    ready: bool
    reason: str | None
    waiting: NonNegative
    running: NonNegative
    pools: list[PoolView]
    tokens: TierTokens | None
    modalities: list[str]
    counters: dict[str, float]


class StageView(AnswerShape):
    """`worker` is a stage that does both prefill and decode."""

    stage: Literal["gateway", "encode", "prefill", "decode", "worker"]
    processes: list[ProcessView]


class RecentReceipt(ReceiptAnswer):
    """A request that has ended; `sequence` counts those of this gateway from 1."""

    sequence: NonNegative


class PipelineView(AnswerShape):
    """`sequence` counts the requests that have ended; ask with `after` to get only those that ended since.
    `requests` are receipts, oldest first, each with its own `sequence`."""

    object: Literal["pipeline"]
    model: str
    status: Literal["ready", "waiting", "draining"]
    now_unix_s: Seconds
    uptime_s: Seconds
    max_inflight: NonNegative
    sequence: NonNegative
    stages: list[StageView]
    requests: list[RecentReceipt]


class Pipeline:
    """Everything shared is handed in. `clock` is monotonic, `unix_clock` wall time, both in seconds."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        fleet: Fleet,
        encoder: Encoder,
        admission: Admission,
        recent: RecentRequests,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._encoder = encoder
        self._admission = admission
        self._recent = recent
        self._clock = clock
        self._unix_clock = unix_clock
        self._started_s = clock()

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="GET",
                path="/v1/pipeline",
                handler=self.pipeline,
                tag="status",
                summary="The stages now, and where the time of the last requests went",
                responses={200: Answer(description="The pipeline", shape=PipelineView)},
                errors=(400,),
                parameters=(
                    Parameter(
                        name="after",
                        where="query",
                        description="Only requests with a sequence beyond this one",
                        schema={"type": "integer", "minimum": 0, "default": 0},
                    ),
                ),
            ),
        )

    async def pipeline(self, request: web.Request) -> web.Response:
        view = self.view(owner=owner_of(request), after=_after(request))
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return web.Response(text=json.dumps(view), content_type="application/json", headers=headers)

    def view(self, *, owner: str, after: int = 0) -> dict[str, Any]:
        """A `PipelineView` as JSON. Tests hold it to that shape, not this: it is made once a second for every page that
        is open, on the loop that answers requests."""
        stages = [self._gateway(), *self._encode(), *self._workers()]
        is_ready = all(process["ready"] for stage in stages for process in stage["processes"])
        return {
            "object": "pipeline",
            "model": self._config.model_name,
            "status": "draining" if self._admission.draining else "ready" if is_ready else "waiting",
            "now_unix_s": self._unix_clock(),
            "uptime_s": self._clock() - self._started_s,
            "max_inflight": self._config.max_inflight,
            "sequence": self._recent.num_added,
            "stages": stages,
            "requests": [entry.to_json() for entry in self._recent.of_owner(owner, after=after)],
        }

    def _gateway(self) -> dict[str, Any]:
        draining = self._admission.draining
        process = _process(
            "gateway",
            reason="draining: it stops when what is in flight has ended" if draining else None,
            running=self._admission.num_inflight,
            counters={"requests": float(self._recent.num_added)},
        )
        return {"stage": "gateway", "processes": [process]}

    def _encode(self) -> Iterator[dict[str, Any]]:
        infos = self._encoder.infos()
        if infos:
            arenas: set[str] = set()
            whys = self._encoder.why_not_up()
            yield {
                "stage": "encode",
                "processes": [_encoder(name, info, whys[name], arenas) for name, info in infos.items()],
            }

    def _workers(self) -> Iterator[dict[str, Any]]:
        for role in self._fleet.roles:
            processes = [_worker(worker, self._fleet.why_not_ready(worker)) for worker in self._fleet.of_role(role)]
            yield {"stage": STAGE_OF_ROLE[role], "processes": processes}


def _process(
    name: str,
    *,
    reason: str | None,
    waiting: int = 0,
    running: int = 0,
    pools: list[dict[str, Any]] | None = None,
    tokens: dict[str, int] | None = None,
    modalities: list[str] | None = None,
    counters: dict[str, float] | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "ready": reason is None,
        "reason": reason,
        "waiting": waiting,
        "running": running,
        "pools": pools or [],
        "tokens": tokens,
        "modalities": modalities or [],
        "counters": counters or {},
    }


def _encoder(name: str, info: EncoderInfo | None, why: str | None, arenas: set[str]) -> dict[str, Any]:
    """Encoders of one host share an arena, which is told once."""
    if info is None:
        return _process(name, reason=why or "not up")
    pools = []
    if info.arena not in arenas:
        arenas.add(info.arena)
        free = info.capacity_bytes - info.cached_bytes
        pools = [_pool("embeddings", "bytes", total=info.capacity_bytes, unleased=free, leased=info.leased_bytes)]
    if info.wedged:
        reason: str | None = f"a batch has been in the tower for {info.tower_busy_s:.0f} s"
    else:
        reason = None if info.ready else "takes no media now"
    return _process(
        info.replica,
        reason=reason,
        running=info.num_pending,
        pools=pools,
        modalities=[modality.value for modality in info.modalities],
        counters=_chosen(_ENCODER_COUNTERS, info.counters),
    )


def _worker(worker: Worker, reason: str | None) -> dict[str, Any]:
    info = worker.info
    if info is None:
        return _process(worker.address, reason=reason or "has not answered yet")
    tiers = {
        counter.labels["tier"]: int(counter.value)
        for counter in info.labelled
        if counter.name == "cache_hit_tokens_total"
    }
    return _process(
        info.worker,
        reason=reason,
        waiting=info.num_waiting,
        running=info.num_running,
        pools=[
            _pages("full", info.full_pages_total, info.full_pages_free, info.full_pages_cached),
            _pages("window", info.window_pages_total, info.window_pages_free, info.window_pages_cached),
        ],
        tokens={tier: tiers.get(tier, 0) for tier in _TIERS}
        | {"computed": int(info.counters.get("prompt_tokens", 0.0))},
        counters=_chosen(_WORKER_COUNTERS, info.counters),
    )


def _pages(pool: str, total: int, free: int, cached: int) -> dict[str, Any]:
    """Cached pages are counted among the free ones by the worker: they can be had."""
    return {
        "pool": pool,
        "unit": "pages",
        "total": total,
        "free": free - cached,
        "cached": cached,
        "leased": total - free,
    }


def _pool(pool: str, unit: str, *, total: int, unleased: int, leased: int) -> dict[str, Any]:
    free = max(0, min(unleased, total - leased))
    return {
        "pool": pool,
        "unit": unit,
        "total": total,
        "free": free,
        "cached": total - free - leased,
        "leased": leased,
    }


def _chosen(names: tuple[str, ...], counters: Mapping[str, float]) -> dict[str, float]:
    return {name: counters[name] for name in names if name in counters}


def _after(request: web.Request) -> int:
    """Raises InvalidRequest."""
    text = request.query.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest(f"after is {shown(text)}; allowed: whole numbers from 0", param="after")
    return int(text)
