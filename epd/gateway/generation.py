"""One answer over as many attempts as it takes: submit, deltas in order, and again on another worker when one is lost.

    attempt 1   prompt                              tokens [0, k) arrive, worker lost
    attempt 2   prompt + tokens [0, k)              tokens [k, ..) arrive, Finish

The client sees one stream of tokens with one end. Messages of an attempt that was given up never get here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec

from encoder.tracing import Carrier, Span
from encoder.types import EmbeddingRef
from epd.errors import StageUnavailable
from epd.gateway.account import Account, AttemptTimes
from epd.gateway.problems import Problem, Refused
from epd.gateway.traces import attempt_span
from epd.router.attempts import Attempt, Lost
from epd.router.workers import Fleet
from epd.types import Finish, FinishReason, GenerateRequest, TokenDelta, TokenLogprob, Usage

logger = logging.getLogger(__name__)

# A Finish may overtake the last delta of another worker (prefill's first token); after this long the delta is lost.
_OVERTAKEN_S = 2.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens of the answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The answer is whole. Usage covers all attempts. `stop_token_id` is the token that stopped it, if one did."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class _Failed:
    """An attempt ended without an answer, and another one may succeed."""

    reason: str
    worker: str | None


class InOrder:
    """Deltas by index: duplicates fall away, what comes early waits. `next_index` is the first token not given out."""

    def __init__(self, next_index: int) -> None:
        self.next_index = next_index
        self._early: dict[int, TokenDelta] = {}

    def push(self, delta: TokenDelta) -> list[Tokens]:
        if delta.index > self.next_index:
            self._early[delta.index] = delta
            return []
        ready = self._take(delta)
        while (following := self._early.pop(self.next_index, None)) is not None:
            ready += self._take(following)
        return ready

    def _take(self, delta: TokenDelta) -> list[Tokens]:
        known = self.next_index - delta.index
        fresh = delta.token_ids[known:]
        self.next_index += len(fresh)
        return [Tokens(fresh, delta.logprobs[known:])] if fresh else []


class Generation:
    """The run of one request. `base.request_id` names it; attempt n is submitted as `<id>#<n>`."""

    def __init__(
        self,
        *,
        base: GenerateRequest,
        fleet: Fleet,
        refresh_embeddings: Callable[[], Awaitable[tuple[EmbeddingRef, ...]]],
        release_embeddings: Callable[[], None],
        clock: Callable[[], float],
        max_attempts: int,
        restart_wait_s: float,
        account: Account | None = None,
        item: str = "",
    ) -> None:
        """`refresh_embeddings` is asked before every attempt but the first: the refs may have died with a worker, and
        `release_embeddings` is called when an attempt's first token arrives: every row has been read by then. The steps
        of the attempts are entered in `account`, as those of `item`."""
        self._base = base
        self._fleet = fleet
        self._refresh_embeddings = refresh_embeddings
        self._release_embeddings = release_embeddings
        self._clock = clock
        self._max_attempts = max_attempts
        self._restart_wait_s = restart_wait_s
        self._account = account
        self._item = item
        self._found: Usage | None = None
        self._emitted: list[int] = []
        self._avoid: set[str] = set()
        self.num_attempts = 0

    async def run(self) -> AsyncGenerator[Tokens | End, None]:
        """Tokens, then exactly one End. Raises Refused for a failure the worker explained, StageUnavailable after the
        last attempt. Closing the iterator early aborts the request at the workers."""
        embeddings = self._base.embeddings
        failure = "no attempt was made"
        before: Carrier | None = None
        for number in range(1, self._max_attempts + 1):
            self.num_attempts = number
            if self._account is not None:
                self._account.attempted()
            if number > 1:
                logger.info("request %s: attempt %d, because %s", self._base.request_id, number, failure)
                embeddings = await self._refresh_embeddings()
            with attempt_span(self._base, number, item=self._item, after=before, because=failure) as traced:
                before = traced.carrier
                async with aclosing(self._attempt(self._request(number, embeddings, traced))) as events:
                    async for event in events:
                        if isinstance(event, _Failed):
                            failure = event.reason
                            self._avoid |= {event.worker} if event.worker is not None else set()
                            traced.fail("attempt_failed", failure)
                            continue
                        yield event
                        if isinstance(event, End):
                            return
            if len(self._emitted) >= self._base.sampling.max_tokens:
                # Everything had arrived; only the Finish was lost.
                yield End(FinishReason.LENGTH, self.usage_so_far(len(self._emitted)))
                return
        raise StageUnavailable(f"gave up after {self._max_attempts} attempts; the last failed: {failure}")

    async def _attempt(self, request: GenerateRequest) -> AsyncGenerator[Tokens | End | _Failed, None]:
        """One attempt: its tokens, then an End or why another one may succeed. Raises as `run` does."""
        times = AttemptTimes(dispatched_s=self._clock())
        attempt: Attempt | None = None
        try:
            attempt = await self._fleet.submit(
                request, give_up_s=self._clock() + self._restart_wait_s, avoid=self._avoid
            )
            async with aclosing(self._follow(attempt, request.num_emitted, times)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        if len(self._emitted) == request.num_emitted:
                            self._release_embeddings()
                        self._emitted.extend(event.token_ids)
                    yield self._end(event, request.num_emitted) if isinstance(event, Finish) else event
        finally:
            if attempt is not None:
                self._fleet.close(attempt)
            if self._account is not None:
                times.enter(self._account, self._clock(), item=self._item)

    def usage_so_far(self, num_tokens: int) -> Usage:
        """Of an answer that is ended here after `num_tokens`, before its worker has ended it."""
        return self._usage(num_tokens, self._found or Usage(prompt_tokens=0, completion_tokens=0))

    def _request(self, number: int, embeddings: tuple[EmbeddingRef, ...], traced: Span) -> GenerateRequest:
        return msgspec.structs.replace(
            self._base,
            request_id=f"{self._base.request_id}#{number}",
            token_ids=(*self._base.token_ids, *self._emitted),
            embeddings=embeddings,
            num_emitted=len(self._emitted),
            traceparent=traced.carrier.traceparent,
            tracestate=traced.carrier.tracestate,
        )

    async def _follow(
        self, attempt: Attempt, num_emitted: int, times: AttemptTimes
    ) -> AsyncGenerator[Tokens | Finish | _Failed, None]:
        """The events of one attempt: tokens in order, then a Finish of an answer or a failure that may be retried."""
        order = InOrder(num_emitted)
        finish: Finish | None = None
        while finish is None or order.next_index < num_emitted + _num_sent(finish):
            event = await _next(attempt, None if finish is None else _OVERTAKEN_S)
            match event:
                case None:
                    yield _Failed(f"tokens from {order.next_index} on never arrived", None)
                    return
                case TokenDelta():
                    self._hear(event, times)
                    for tokens in order.push(event):
                        yield tokens
                case Lost(worker=worker, reason=reason):
                    yield _Failed(f"worker {worker}: {reason}", worker)
                    return
                case Finish() if _is_retryable(event):
                    finished_by = attempt.finished_by.address if attempt.finished_by is not None else None
                    yield _Failed(event.message or event.code or "the worker gave it up", finished_by)
                    return
                case Finish(reason=FinishReason.FAILED | FinishReason.CANCELLED):
                    raise Refused(_problem(event))
                case Finish():
                    times.timings |= event.timings
                    finish = event
        yield finish

    def _hear(self, delta: TokenDelta, times: AttemptTimes) -> None:
        """What workers say of themselves with their first delta of the attempt."""
        if times.first_token_s is None:
            times.first_token_s = self._clock()
        if delta.usage is None:
            return
        if "decode_queue_s" in delta.timings:
            times.decode_began_s = self._clock()
        times.timings |= delta.timings
        self._found = delta.usage

    def _end(self, finish: Finish, num_emitted: int) -> End:
        usage = self._usage(num_emitted + finish.usage.completion_tokens, finish.usage)
        return End(finish.reason, usage, finish.stop_token_id)

    def _usage(self, completion_tokens: int, found: Usage) -> Usage:
        """Tokens as the client counts them: what an earlier attempt wrote is no part of the prompt. What is beyond the
        prompt goes from the slowest tier first, since what comes from there are the ends of prompts."""
        num_prompt = len(self._base.token_ids)
        num_device = found.cached_tokens - found.host_tokens - found.store_tokens
        num_cached = min(found.cached_tokens, num_prompt)
        num_host = max(0, min(found.host_tokens, num_cached - num_device))
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=completion_tokens,
            cached_tokens=num_cached,
            healed_tokens=min(found.healed_tokens, num_prompt),
            host_tokens=num_host,
            store_tokens=max(0, min(found.store_tokens, num_cached - num_device - num_host)),
        )


async def _next(attempt: Attempt, timeout_s: float | None) -> TokenDelta | Finish | Lost | None:
    """The next event, or None after `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await attempt.next_event()
    return None


def _num_sent(finish: Finish) -> int:
    """Tokens of the attempt that travel as deltas: all but the one that stopped the answer."""
    return finish.usage.completion_tokens - (finish.reason is FinishReason.STOP)


def _is_retryable(finish: Finish) -> bool:
    """A failure of the machinery, or a cancellation nobody asked for (the worker took this gateway for dead)."""
    if finish.reason is FinishReason.CANCELLED:
        return finish.retryable or finish.status < 400
    return finish.reason is FinishReason.FAILED and finish.retryable


def _problem(finish: Finish) -> Problem:
    status = finish.status if finish.status >= 400 else 500
    return Problem(status, finish.code or "generation_failed", finish.message or "the worker failed without a reason")
