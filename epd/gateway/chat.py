"""One chat completion, start to end:

    body -> messages and sources -> prompt -> media encoded -> spans -> submit -> tokens -> text -> parts of the answer

Nothing here knows HTTP; `epd.gateway.app` turns parts into JSON and errors into statuses.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from epd.config import GatewayConfig
from epd.errors import ContextTooLong
from epd.gateway.answer import AnswerParser, Piece, joined
from epd.gateway.conversation import Conversation, read_conversation
from epd.gateway.detokenize import Detokenizer, StopStrings
from epd.gateway.generation import End, Generation, Tokens
from epd.gateway.media import MediaSet, MediaStage
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.render import AssembledPrompt, Prompt, Renderer, context_words, fit_answer
from epd.gateway.reply import AnswerEnd, AnswerPart, finish_reason
from epd.gateway.schema import ChatBody
from epd.gateway.session import session_of
from epd.gateway.toolcalls import ToolCall
from epd.router.workers import Fleet
from epd.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob, Usage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatService:
    """What all requests share. `clock` is monotonic, `unix_clock` wall time, both in seconds."""

    config: GatewayConfig
    renderer: Renderer
    media: MediaStage
    fleet: Fleet
    metrics: GatewayMetrics
    clock: Callable[[], float]
    unix_clock: Callable[[], float]

    async def answer(self, body: ChatBody, request_id: str) -> AsyncGenerator[AnswerPart | AnswerEnd, None]:
        """The answer's parts, then its end. `request_id` is unique.
        Closing the iterator early cancels the request everywhere. Raises ServeError."""
        started_s, arrival_unix_s = self.clock(), self.unix_clock()
        deadline_unix_s = arrival_unix_s + self.config.request_timeout_s
        # On a thread: a long text takes the tokenizer a while, a hostile template all of its budget.
        conversation, prompt, session = await asyncio.to_thread(self._render, body)
        self._check_length(prompt)
        async with self.media.open(conversation.media, deadline_unix_s=deadline_unix_s) as media:
            self._count_media(conversation, started_s)
            warnings = media.warnings
            for warning in warnings:
                logger.info("request %s: %s", request_id, warning)
            assembled = self.renderer.assemble(prompt, media.layouts)
            request = GenerateRequest(
                request_id=request_id,
                token_ids=assembled.token_ids,
                spans=assembled.spans,
                embeddings=media.refs,
                sampling=self._sampling(body, len(assembled.token_ids)),
                arrival_unix_s=arrival_unix_s,
                deadline_unix_s=deadline_unix_s,
                session=session,
            )
            reader = AnswerReader(
                renderer=self.renderer,
                body=body,
                conversation=conversation,
                prompt=prompt,
                assembled=assembled,
                warnings=warnings,
            )
            async with aclosing(self._read(self._generation(request, media), reader, started_s)) as parts:
                async for part in parts:
                    yield part

    async def _read(
        self, generation: Generation, reader: "AnswerReader", started_s: float
    ) -> AsyncGenerator[AnswerPart | AnswerEnd, None]:
        """Tokens to parts, up to the Finish or the first stop string."""
        async with aclosing(generation.run()) as events:
            async for event in events:
                if reader.num_tokens == 0:
                    self.metrics.ttft.observe(self.clock() - started_s)
                part = reader.read(event) if isinstance(event, Tokens) else reader.rest()
                if part is not None:
                    yield part
                if isinstance(event, End) or reader.stopped:
                    end = reader.end(event if isinstance(event, End) else None)
                    self.metrics.finished(end, generation.num_attempts)
                    self.metrics.duration.observe(self.clock() - started_s)
                    yield end
                    return

    def _generation(self, request: GenerateRequest, media: MediaSet) -> Generation:
        return Generation(
            base=request,
            fleet=self.fleet,
            refresh_embeddings=media.refresh,
            release_embeddings=media.release,
            clock=self.clock,
            max_attempts=self.config.max_attempts,
            restart_wait_s=self.config.restart_wait_s,
        )

    def _render(self, body: ChatBody) -> tuple[Conversation, Prompt, str]:
        conversation = read_conversation(body, self.renderer.vocabulary.guard)
        return conversation, self.renderer.render(conversation), session_of(body)

    def _check_length(self, prompt: Prompt) -> None:
        """Raises ContextTooLong before anything is fetched when the text alone is too long already."""
        if prompt.num_text_tokens >= self.max_context_tokens:
            raise ContextTooLong(
                f"the text of the prompt has {prompt.num_text_tokens} tokens; "
                f"{context_words(self.max_context_tokens, self.renderer.max_context_tokens)}, answer included",
                param="messages",
            )

    @property
    def max_context_tokens(self) -> int:
        """The model's, or less when a worker has room for less."""
        reported = self.fleet.max_context_tokens()
        own = self.renderer.max_context_tokens
        return own if reported is None else min(own, reported)

    def _count_media(self, conversation: Conversation, started_s: float) -> None:
        for medium in conversation.media:
            self.metrics.media.labels(medium.source.modality.value).inc()
        if conversation.media:
            self.metrics.media_seconds.observe(self.clock() - started_s)

    def _sampling(self, body: ChatBody, num_prompt_tokens: int) -> SamplingParams:
        defaults = self.renderer.defaults
        return SamplingParams(
            max_tokens=fit_answer(
                num_prompt_tokens,
                asked=body.token_limit,
                default=self.config.default_max_tokens,
                max_context_tokens=self.max_context_tokens,
                model_context_tokens=self.renderer.max_context_tokens,
            ),
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else body.top_k,
            # Without a seed every request draws its own.
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop_token_ids=() if body.ignore_eos else self.renderer.eos_token_ids,
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )


class AnswerReader:
    """Tokens of one answer to its parts, in order; knows when a stop string ended it."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        body: ChatBody,
        conversation: Conversation,
        prompt: Prompt,
        assembled: AssembledPrompt,
        warnings: tuple[str, ...],
    ) -> None:
        """`warnings`: of the request's media, for the client."""
        self._detokenizer = Detokenizer(renderer.vocabulary.token_bytes)
        self._stops = StopStrings(body.stop_strings)
        tools: Mapping[str, Mapping[str, Any]] | None = conversation.tool_schemas
        self._parser = AnswerParser(tools=tools, in_reasoning=prompt.opens_reasoning)
        self._assembled = assembled
        self._warnings = warnings
        self._single_call = body.parallel_tool_calls is False
        self._num_reasoning_tokens = 0
        self._has_tool_calls = False
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """The answer ends here whatever the worker still writes: at a stop string (they are looked for in all that the
        model writes, reasoning and calls included), or at the first call where the client wants one at most."""
        return self._stops.matched is not None or (self._single_call and self._has_tool_calls)

    def read(self, tokens: Tokens) -> AnswerPart | None:
        """None when the tokens completed nothing that can be shown."""
        shown: list[Piece] = []
        num_read = 0
        for token_id in tokens.token_ids:
            num_read += 1
            was_reasoning = self._parser.in_reasoning
            shown += self._seen(self._parser.push(self._stops.push(self._detokenizer.push((token_id,)))))
            # The tags are not counted: an empty pair is no reasoning.
            self._num_reasoning_tokens += was_reasoning and self._parser.in_reasoning
            if self.stopped:
                shown += self._seen(self._parser.close())
                break
        self.num_tokens += num_read
        return self._part(shown, tokens.logprobs[:num_read])

    def rest(self) -> AnswerPart | None:
        """What was held back, at the end of the answer."""
        tail = self._stops.push(self._detokenizer.close()) + self._stops.close()
        return self._part(self._seen([*self._parser.push(tail), *self._parser.close()]), ())

    def end(self, end: End | None) -> AnswerEnd:
        """None: a stop string ended the answer before the worker did, so nothing is known of its cache."""
        if end is None:
            usage = Usage(prompt_tokens=len(self._assembled.token_ids), completion_tokens=self.num_tokens)
            end = End(FinishReason.STOP, usage)
        return AnswerEnd(
            finish_reason(end.reason, has_tool_calls=self._has_tool_calls),
            end.usage,
            self._num_reasoning_tokens,
            self._assembled.num_media_tokens,
            self._warnings,
        )

    def _seen(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that belong to the answer: none after the first call where the client wants one at most."""
        kept: list[Piece] = []
        for piece in pieces:
            if self._single_call and self._has_tool_calls:
                break
            kept.append(piece)
            self._has_tool_calls = self._has_tool_calls or isinstance(piece, ToolCall)
        return kept

    def _part(self, pieces: list[Piece], logprobs: tuple[TokenLogprob, ...]) -> AnswerPart | None:
        return AnswerPart(tuple(joined(pieces)), logprobs) if pieces or logprobs else None
