"""Where the time of one request went: measured steps, the tokens it took, and how it ended.

Every request of the API that generates has one receipt, also one that was refused or whose client left. A client gets
it as `timings` when it asks (`return_timings`); the page and `GET /v1/pipeline` show the last ones.

All times of a step are in seconds since the request's arrival, by the gateway's clock. What another process measured
is placed inside the time the gateway waited for it, so steps never begin before the request or end after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Stage = Literal["gateway", "encode", "prefill", "transfer", "decode"]
STAGES: tuple[Stage, ...] = ("gateway", "encode", "prefill", "transfer", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured piece of work or wait.

    | stage | names |
    |---|---|
    | gateway | read, parse, render, fetch, assemble, prefix_wait, dispatch |
    | encode | queue, prepare, batch_wait, tower |
    | prefill | queue, compute, unfinished |
    | transfer | inputs, kv |
    | decode | queue, decode |

    `item` is the part of the request the step belongs to (`messages[0].content[1]`) or the choice (`choices[2]`);
    empty when it belongs to the whole request.
    """

    stage: Stage
    name: str
    start_s: float
    duration_s: float
    item: str = ""

    @property
    def stop_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTokens:
    """Prompt tokens that were not computed, by the tier they came from: `l1` the device, `l2` the host's memory, `l3`
    the store. `healed` were computed again only to restore the windows of a cached prefix."""

    l1: int = 0
    l2: int = 0
    l3: int = 0
    healed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """`status` is the HTTP status, 499 for a client that left. `finish_reason` is the answer's (of several choices the
    first one's), "error" for a request that was refused or failed, "cancelled" for one whose client left.
    `media_tokens` are placeholders by modality; `cached_media` of `num_media` embeddings were in the encoder's cache.
    """

    request_id: str
    model: str
    arrival_unix_s: float
    route: str
    status: int
    finish_reason: str
    duration_s: float
    steps: tuple[Step, ...] = ()
    first_token_s: float | None = None
    """From the arrival to the first token; None when there was none."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    num_media: int = 0
    cached_media: int = 0
    cache_tokens: CacheTokens = field(default_factory=CacheTokens)
    num_attempts: int = 0
    num_choices: int = 1
    error: str | None = None
    """The code of the error object, when one was sent."""

    def to_json(self) -> dict[str, Any]:
        """As clients and the page get it; seconds are rounded to microseconds."""
        cache = self.cache_tokens
        return {
            "request_id": self.request_id,
            "model": self.model,
            "route": self.route,
            "arrival_unix_s": round(self.arrival_unix_s, 6),
            "duration_s": round(self.duration_s, 6),
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 6),
            "status": self.status,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "num_attempts": self.num_attempts,
            "num_choices": self.num_choices,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "media_tokens": dict(self.media_tokens),
            "num_media": self.num_media,
            "cached_media": self.cached_media,
            "cache_tokens": {"l1": cache.l1, "l2": cache.l2, "l3": cache.l3, "healed": cache.healed},
            "steps": [_step_json(step) for step in self.steps],
        }


def _step_json(step: Step) -> dict[str, Any]:
    start_s = round(step.start_s, 6)
    return {
        "stage": step.stage,
        "name": step.name,
        "item": step.item,
        "start_s": start_s,
        # Of the rounded ends, so that steps that touch still do.
        "duration_s": round(round(step.stop_s, 6) - start_s, 6),
    }
