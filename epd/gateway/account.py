"""What is known of one request so far, written by whoever learns it; at its end it becomes the `Receipt`.

    arrival   read  render  fetch  encoder | dispatch  inputs  queue  compute | kv  queue  decode
              gateway ............  encode   gateway  transfer prefill         transfer decode

Workers measure by their own clocks. Their durations are laid out backwards from the first token, whose moment the
gateway knows: what is left of the time since the dispatch was spent on choosing a worker and on the way.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from encoder.types import StageTimings
from epd.gateway.problems import Problem
from epd.gateway.receipt import CacheTokens, Receipt, Stage, Step
from epd.types import Usage

CLIENT_LEFT = 499
"""Not a status of HTTP but a custom among servers; it is never sent, only counted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """`clock` is monotonic, `started_s` its reading at the arrival. Belongs to one request, on one event loop."""

    request_id: str
    model: str
    route: str
    arrival_unix_s: float
    clock: Callable[[], float]
    started_s: float
    owner: str = ""
    """Whose request it is, see `epd.gateway.owner`."""
    num_choices: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    num_retries: int = 0
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    num_media: int = 0
    cached_media: int = 0
    found: Usage | None = None
    """What admission found of the prompt in caches; of several choices the first one's, which computed it."""
    first_token_s: float | None = None
    status: int = 500
    finish_reason: str = "error"
    error: str | None = "internal_error"
    _num_attempts: int = 0
    _steps: list[Step] = field(default_factory=list)

    def add(self, stage: Stage, name: str, start_s: float, stop_s: float, *, item: str = "") -> None:
        """A step between two readings of the clock; one that took no time is left out."""
        if stop_s > start_s:
            self._steps.append(
                Step(stage=stage, name=name, start_s=start_s - self.started_s, duration_s=stop_s - start_s, item=item)
            )

    @contextmanager
    def measured(self, stage: Stage, name: str, *, item: str = "") -> Iterator[None]:
        """The block is a step, however it ends."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(stage, name, start_s, self.clock(), item=item)

    def tokens(self, num_tokens: int, *, num_reasoning: int) -> None:
        """Count tokens that came."""
        if self.first_token_s is None:
            self.first_token_s = self.clock() - self.started_s
        self.completion_tokens += num_tokens
        self.reasoning_tokens += num_reasoning

    def attempted(self) -> None:
        """An attempt of any choice was made."""
        self._num_attempts += 1

    def encoded(self, timings: StageTimings, start_s: float, stop_s: float, *, item: str) -> None:
        """A medium was asked for and came. Laid out backwards from the reply, so the queue has the way there as well.
        Of a long video the preparation and the tower overlap."""
        in_tower_s = max(start_s, stop_s - timings.tower_s)
        waiting_s = max(start_s, in_tower_s - timings.batch_wait_s)
        begun_s = max(min(start_s + timings.queue_s, stop_s), waiting_s - timings.prepare_s)
        self.add("encode", "queue", start_s, begun_s, item=item)
        if timings.tower_s > 0:
            self.add("encode", "prepare", begun_s, min(begun_s + timings.prepare_s, stop_s), item=item)
            self.add("encode", "batch_wait", max(begun_s, waiting_s), in_tower_s, item=item)
            self.add("encode", "tower", in_tower_s, stop_s, item=item)

    def answered(self, finish_reason: str) -> None:
        """The answer is whole."""
        self.status, self.finish_reason, self.error = 200, finish_reason, None

    def failed(self, problem: Problem) -> None:
        self.status, self.finish_reason, self.error = problem.status, "error", problem.code

    def left(self) -> None:
        """The client did not wait for the end."""
        self.status, self.finish_reason, self.error = CLIENT_LEFT, "cancelled", None

    def receipt(self) -> Receipt:
        """As of now."""
        found = self.found or Usage(prompt_tokens=0, completion_tokens=0)
        return Receipt(
            request_id=self.request_id,
            model=self.model,
            arrival_unix_s=self.arrival_unix_s,
            route=self.route,
            status=self.status,
            finish_reason=self.finish_reason,
            duration_s=self.clock() - self.started_s,
            steps=tuple(sorted(self._steps, key=lambda step: (step.start_s, step.stop_s))),
            first_token_s=self.first_token_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            reasoning_tokens=self.reasoning_tokens,
            media_tokens=self.media_tokens,
            num_media=self.num_media,
            cached_media=self.cached_media,
            cache_tokens=CacheTokens(
                l1=found.cached_tokens - found.host_tokens - found.store_tokens,
                l2=found.host_tokens,
                l3=found.store_tokens,
                healed=found.healed_tokens,
            ),
            num_attempts=self._num_attempts,
            num_choices=self.num_choices,
            error=self.error,
        )


@dataclass(slots=True, kw_only=True)
class AttemptTimes:
    """One attempt as the gateway saw it, by its clock, and what workers said of it. See `Finish.timings`."""

    dispatched_s: float
    first_token_s: float | None = None
    decode_began_s: float | None = None
    """When the decode worker was first heard."""
    timings: dict[str, float] = field(default_factory=dict)

    def enter(self, account: Account, stop_s: float, *, item: str) -> None:
        """Add the steps of the attempt, which ended at `stop_s`."""
        told = self.timings
        first_s = self.first_token_s
        if first_s is None and "prefill_s" in told:
            # An answer whose first token ended it: nothing was sent before the end.
            first_s = stop_s - told.get("decode_s", 0.0)
        if first_s is None:
            account.add("prefill", "unfinished", self.dispatched_s, stop_s, item=item)
            return
        first_s = max(first_s, self.dispatched_s)
        computed_s = max(self.dispatched_s, first_s - told.get("prefill_s", 0.0))
        queued_s = max(self.dispatched_s, computed_s - told.get("queue_s", 0.0))
        inputs_s = min(computed_s, queued_s + told.get("inputs_s", 0.0))
        account.add("gateway", "dispatch", self.dispatched_s, queued_s, item=item)
        account.add("transfer", "inputs", queued_s, inputs_s, item=item)
        account.add("prefill", "queue", inputs_s, computed_s, item=item)
        account.add("prefill", "compute", computed_s, first_s, item=item)
        decode_s = first_s
        if "transfer_s" in told:
            latest_s = stop_s if self.decode_began_s is None else max(first_s, self.decode_began_s)
            arrived_s = min(latest_s, first_s + told["transfer_s"])
            decode_s = min(latest_s, arrived_s + told.get("decode_queue_s", 0.0))
            account.add("transfer", "kv", first_s, arrived_s, item=item)
            account.add("decode", "queue", arrived_s, decode_s, item=item)
        account.add("decode", "decode", decode_s, stop_s, item=item)
