"""Which worker takes a request: pure functions of what is known about the workers. Same input, same answer.

A prompt prefers the worker that its first tokens hash to, where earlier requests with that beginning left their KV; it
leaves that worker when the worker is clearly busier than the least loaded one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import xxhash

from epd.types import GenerateRequest

AFFINITY_TOKENS = 256
"""Tokens at the start of a prompt that choose the preferred worker."""

AFFINITY_SLACK = 4
"""Requests by which the preferred worker may be busier than the least loaded one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker as the router sees it. `num_assigned` counts this gateway's own unfinished requests, known at once;
    `num_reported` is the worker's waiting plus running requests, as old as its last heartbeat."""

    worker: str
    num_assigned: int
    num_reported: int
    full_pages_free: int
    window_pages_free: int

    @property
    def num_requests(self) -> int:
        return max(self.num_assigned, self.num_reported)


def prefix_affinity(request: GenerateRequest, *, num_tokens: int = AFFINITY_TOKENS) -> int:
    """64-bit hash of the first tokens; a placeholder counts as its medium and row, not as its pad id."""
    digest = xxhash.xxh3_64()
    head = request.token_ids[:num_tokens]
    digest.update(b"".join(token_id.to_bytes(8, "little") for token_id in head))
    for span in request.spans:
        if span.start >= len(head):
            break
        digest.update(f"{span.start} {span.key} {span.row_start}".encode())
    return digest.intdigest()


def choose_worker(
    loads: Sequence[WorkerLoad], *, affinity: int | None = None, avoid: Collection[str] = ()
) -> str | None:
    """The worker to use, or None when there is none. `avoid` is obeyed as long as another worker exists.

    Ties: fewer requests, then more free pages (the scarcer pool counts), then the name.
    """
    candidates = [load for load in loads if load.worker not in avoid] or list(loads)
    if not candidates:
        return None
    least = min(candidates, key=_order)
    if affinity is None:
        return least.worker
    preferred = max(candidates, key=lambda load: (_weight(affinity, load.worker), load.worker))
    if preferred.num_requests <= least.num_requests + AFFINITY_SLACK:
        return preferred.worker
    return least.worker


def _order(load: WorkerLoad) -> tuple[int, int, str]:
    return load.num_requests, -min(load.full_pages_free, load.window_pages_free), load.worker


def _weight(affinity: int, worker: str) -> int:
    """Rendezvous hashing: a worker that leaves or joins moves only its own share of the prompts."""
    return xxhash.xxh3_64_intdigest(affinity.to_bytes(8, "little") + worker.encode())
