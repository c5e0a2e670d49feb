"""One choice of a request, start to end, and all of them together as the events of one answer."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from encoder.types import EmbeddingRef
from epd.config import GatewayConfig
from epd.gateway.account import Account
from epd.gateway.choices import SharedPrompt, merged
from epd.gateway.generation import End, Generation, Tokens
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.reply import AnswerEnd, AnswerEvent, AnswerPart, ChoiceEnd
from epd.router.workers import Fleet
from epd.types import FinishReason, GenerateRequest, SamplingParams, Usage
from preprocess.types import Modality


class ChoiceReader(Protocol):
    """Tokens of one choice to what can be shown; knows when the choice ends whatever the worker still writes."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_reasoning_tokens(self) -> int: ...

    @property
    def stopped(self) -> bool: ...

    def read(self, tokens: Tokens) -> AnswerPart | None:
        """None when the tokens completed nothing that can be shown."""
        ...

    def rest(self, stop_token_id: int | None, reason: FinishReason) -> AnswerPart | None:
        """What was held back, at the end of a choice that was not stopped here; by which token it was stopped."""
        ...

    def end(self, reason: FinishReason) -> tuple[str, str | int | None]:
        """The finish reason as clients know it, and what of the client's made it stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRun:
    """`run` counts the choices of one prompt, `index` those of the request."""

    index: int
    run: int
    generation: Generation
    reader: ChoiceReader
    shared: SharedPrompt
    account: Account
    metrics: GatewayMetrics
    clock: Callable[[], float]
    item: str = ""

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Parts, then the end. Closing it early ends the choice at the workers."""
        if self.run:
            with self.account.measured("gateway", "prefix_wait", item=self.item):
                await self.shared.computed()
        reader, end = self.reader, None
        came_s: float | None = None
        with self.shared.running(self.run):
            async with aclosing(self.generation.run()) as events:
                async for event in events:
                    came_s = self._spaced(event, came_s)
                    part = (
                        self._read(event)
                        if isinstance(event, Tokens)
                        else reader.rest(event.stop_token_id, event.reason)
                    )
                    if part is not None:
                        yield replace(part, index=self.index, num_tokens=reader.num_tokens)
                    if isinstance(event, End):
                        end = event
                    if end is not None or reader.stopped:
                        break
        # Nothing of it is at a worker any more.
        if end is None:
            end = End(FinishReason.STOP, self.generation.usage_so_far(reader.num_tokens))
        self.account.num_retries += self.generation.num_attempts - 1
        reason, stop_reason = reader.end(end.reason)
        yield ChoiceEnd(self.index, reason, stop_reason, end.usage, reader.num_reasoning_tokens)

    def _spaced(self, event: Tokens | End, came_s: float | None) -> float | None:
        """When the last tokens came, now that there is this event."""
        if not isinstance(event, Tokens):
            return came_s
        now_s = self.clock()
        if came_s is not None:
            self.metrics.spaced(now_s - came_s, len(event.token_ids))
        return now_s

    def _read(self, tokens: Tokens) -> AnswerPart | None:
        reader, account = self.reader, self.account
        num_tokens, num_reasoning = reader.num_tokens, reader.num_reasoning_tokens
        part = reader.read(tokens)
        if part is None and not num_tokens:
            # Nothing to show yet, but that the answer has begun.
            part = AnswerPart(())
        if account.first_token_s is None:
            self.metrics.ttft.observe(self.clock() - account.started_s)
        account.tokens(reader.num_tokens - num_tokens, num_reasoning=reader.num_reasoning_tokens - num_reasoning)
        if self.run == 0 and account.found is None:
            account.found = self.generation.usage_so_far(reader.num_tokens)
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Makes them. `clock` is monotonic."""

    config: GatewayConfig
    fleet: Fleet
    metrics: GatewayMetrics
    clock: Callable[[], float]

    def of_prompt(
        self,
        base: GenerateRequest,
        sampling: Callable[[int], SamplingParams],
        readers: Sequence[ChoiceReader],
        account: Account,
        *,
        first_index: int = 0,
        refresh: Callable[[bool], Awaitable[tuple[EmbeddingRef, ...]]],
        release: Callable[[], None],
    ) -> list[ChoiceRun]:
        """A choice of one prompt for each reader. The first computes the prompt; the others find it in the cache."""
        shared = SharedPrompt(len(readers), refresh=refresh, release=release)
        is_alone = account.num_choices == 1
        runs = []
        for run, reader in enumerate(readers):
            index = first_index + run
            item = "" if is_alone else f"choices[{index}]"
            request_id = base.request_id if is_alone else f"{base.request_id}-{index}"
            generation = Generation(
                base=msgspec.structs.replace(base, request_id=request_id, sampling=sampling(run)),
                fleet=self.fleet,
                refresh_embeddings=partial(shared.refreshed, run),
                release_embeddings=partial(shared.has_read, run),
                clock=self.clock,
                max_attempts=self.config.max_attempts,
                restart_wait_s=self.config.restart_wait_s,
                account=account,
                item=item,
            )
            runs.append(
                ChoiceRun(
                    index=index,
                    run=run,
                    generation=generation,
                    reader=reader,
                    shared=shared,
                    account=account,
                    metrics=self.metrics,
                    clock=self.clock,
                    item=item,
                )
            )
        return runs


async def answer_of(
    runs: Sequence[ChoiceRun],
    *,
    limit: int,
    account: Account,
    metrics: GatewayMetrics,
    num_media_tokens: Mapping[Modality, int],
    warnings: tuple[str, ...] = (),
    media: Sequence[Mapping[str, Any]] = (),
) -> AsyncGenerator[AnswerEvent, None]:
    """Events of all choices as they come; the last one has the end of the whole answer. `media` is told to the client
    as it is."""
    ends: dict[int, ChoiceEnd] = {}
    async with aclosing(merged([run.events for run in runs], limit=limit)) as events:
        async for event in events:
            if isinstance(event, ChoiceEnd):
                last = ends[event.index] = event
                if len(ends) == len(runs):
                    break
            yield event
    usage = _whole_usage([ends[run.index].usage for run in runs if run.run == 0], list(ends.values()))
    num_reasoning_tokens = sum(end.num_reasoning_tokens for end in ends.values())
    answer = AnswerEnd(usage, num_reasoning_tokens, num_media_tokens, warnings, media)
    account.found = usage
    account.prompt_tokens, account.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    account.answered(ends[min(ends)].finish_reason)
    metrics.finished(answer, 1 + account.num_retries)
    metrics.duration.observe(account.clock() - account.started_s)
    yield replace(last, answer=answer)


def _whole_usage(of_prompts: Sequence[Usage], ends: Sequence[ChoiceEnd]) -> Usage:
    """Each prompt is counted once, as its first choice found it; what all choices wrote is added up."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in of_prompts),
        completion_tokens=sum(end.usage.completion_tokens for end in ends),
        cached_tokens=sum(usage.cached_tokens for usage in of_prompts),
        healed_tokens=sum(usage.healed_tokens for usage in of_prompts),
        host_tokens=sum(usage.host_tokens for usage in of_prompts),
        store_tokens=sum(usage.store_tokens for usage in of_prompts),
    )
