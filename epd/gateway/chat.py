"""One chat completion, start to end:

    body -> messages and sources -> prompt -> media encoded -> spans -> submit -> tokens -> text -> parts of the answer

Several choices share all that comes before the submit. Nothing here knows HTTP; `epd.gateway.completions` turns parts
into JSON, `epd.gateway.edge` errors into statuses.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from xxhash import xxh3_64_hexdigest

from epd.config import GatewayConfig
from epd.errors import ContextTooLong
from epd.gateway.account import Account
from epd.gateway.answer import AnswerParser, Piece, joined
from epd.gateway.call_stream import CallEnd
from epd.gateway.choice import ChoiceRun, Choices, answer_of
from epd.gateway.conversation import Conversation, read_conversation
from epd.gateway.generation import Tokens
from epd.gateway.grammar import Wish
from epd.gateway.grammar_process import Grammars
from epd.gateway.library import Libraries
from epd.gateway.media import MediaSet, MediaStage
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.render import AssembledPrompt, Prompt, Renderer, context_words
from epd.gateway.reply import AnswerEvent, AnswerPart, finish_reason
from epd.gateway.sampling import answer_text, sampling_of_choices
from epd.gateway.schema import ChatBody
from epd.gateway.session import session_of
from epd.gateway.wishes import wish_of_chat
from epd.router.workers import Fleet
from epd.types import FinishReason, GenerateRequest, TokenLogprob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatService:
    """What all requests share. `clock` is monotonic, `unix_clock` wall time, both in seconds."""

    config: GatewayConfig
    renderer: Renderer
    grammars: Grammars
    media: MediaStage
    libraries: Libraries
    fleet: Fleet
    metrics: GatewayMetrics
    clock: Callable[[], float]
    unix_clock: Callable[[], float]

    async def answer(self, body: ChatBody, account: Account) -> AsyncGenerator[AnswerEvent, None]:
        """The parts of the answer as they come, then its end. `account.request_id` is unique.
        Closing the iterator early cancels the request everywhere. Raises ServeError."""
        deadline_unix_s = account.arrival_unix_s + self.config.request_timeout_s
        # On a thread: a long text takes the tokenizer a while, a hostile template all of its budget.
        with account.measured("gateway", "render"):
            conversation, prompt, wish, session = await asyncio.to_thread(self._render, body, account.owner)
            prompt = replace(prompt, grammar=await self.grammars.grammar(wish))
        self._check_length(prompt)
        async with self.media.open(conversation.media, deadline_unix_s=deadline_unix_s, account=account) as media:
            self._count_media(conversation, account.started_s)
            warnings = media.warnings
            for warning in warnings:
                logger.info("request %s: %s", account.request_id, warning)
            with account.measured("gateway", "assemble"):
                assembled = self.renderer.assemble(prompt, media.layouts)
            account.prompt_tokens = len(assembled.token_ids)
            account.num_media, account.cached_media = len(conversation.media), media.num_cached
            account.media_tokens = {kind.value: num for kind, num in assembled.num_media_tokens.items() if num}
            runs = self._runs(body, account, conversation, prompt, assembled, media, session=session)
            answer = answer_of(
                runs,
                limit=self.config.max_choices,
                account=account,
                metrics=self.metrics,
                num_media_tokens=assembled.num_media_tokens,
                warnings=warnings,
                media=media.told if conversation.tells_media else (),
            )
            async with aclosing(answer) as events:
                async for event in events:
                    yield event

    def _runs(
        self,
        body: ChatBody,
        account: Account,
        conversation: Conversation,
        prompt: Prompt,
        assembled: AssembledPrompt,
        media: MediaSet,
        *,
        session: str,
    ) -> list[ChoiceRun]:
        """The choices, each ready to go."""
        sampling = sampling_of_choices(
            body,
            self.renderer,
            num_prompt_tokens=len(assembled.token_ids),
            token_limit=body.token_limit,
            default_tokens=self.config.default_max_tokens,
            num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            max_context_tokens=self.max_context_tokens,
            grammar=prompt.grammar,
        )
        base = GenerateRequest(
            request_id=account.request_id,
            token_ids=assembled.token_ids,
            spans=assembled.spans,
            embeddings=media.refs,
            sampling=sampling(0),
            arrival_unix_s=account.arrival_unix_s,
            deadline_unix_s=account.arrival_unix_s + self.config.request_timeout_s,
            session=session,
        )
        readers = [
            AnswerReader(renderer=self.renderer, body=body, conversation=conversation, prompt=prompt)
            for _ in range(body.num_choices)
        ]
        return self.choices.of_prompt(base, sampling, readers, account, refresh=media.refresh, release=media.release)

    def system_fingerprint(self) -> str:
        """Of what answers depend on: the model, and the weights and settings of the workers."""
        workers = sorted({worker.info.kv_fingerprint for worker in self.fleet.workers if worker.info is not None})
        told = "\0".join([self.config.model_name, *workers])
        return f"fp_{xxh3_64_hexdigest(told.encode())[:12]}"

    def _render(self, body: ChatBody, owner: str) -> tuple[Conversation, Prompt, Wish, str]:
        conversation = read_conversation(body, self.renderer.vocabulary.guard, self.libraries.of(owner))
        prompt = self.renderer.render(conversation)
        return conversation, prompt, wish_of_chat(body, prompt, self.renderer.grammars), session_of(body)

    def _check_length(self, prompt: Prompt) -> None:
        """Raises ContextTooLong before anything is fetched when the text alone is too long already."""
        if prompt.num_text_tokens >= self.max_context_tokens:
            raise ContextTooLong(
                f"the text of the prompt has {prompt.num_text_tokens} tokens; "
                f"{context_words(self.max_context_tokens, self.renderer.max_context_tokens)}, answer included",
                param="messages",
            )

    @property
    def choices(self) -> Choices:
        return Choices(config=self.config, fleet=self.fleet, metrics=self.metrics, clock=self.clock)

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


class AnswerReader:
    """Tokens of one choice to its parts, in order; see `ChoiceReader`."""

    def __init__(self, *, renderer: Renderer, body: ChatBody, conversation: Conversation, prompt: Prompt) -> None:
        self._text = answer_text(body, renderer)
        tools: Mapping[str, Mapping[str, Any]] | None = conversation.tool_schemas
        self._parser = AnswerParser(tools=tools, in_reasoning=prompt.opens_reasoning)
        self._single_call = body.parallel_tool_calls is False
        self._has_tool_calls = False
        self.num_reasoning_tokens = 0
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """The answer ends here whatever the worker still writes: at a stop string (they are looked for in all that the
        model writes, reasoning and calls included), or at the first call where the client wants one at most."""
        is_over = self._single_call and self._has_tool_calls and not self._parser.in_call
        return self._text.matched is not None or is_over

    def read(self, tokens: Tokens) -> AnswerPart | None:
        shown: list[Piece] = []
        num_read = 0
        for token_id in tokens.token_ids:
            num_read += 1
            was_reasoning = self._parser.in_reasoning
            shown += self._seen(self._parser.push(self._text.push(token_id)))
            # The tags are not counted: an empty pair is no reasoning.
            self.num_reasoning_tokens += was_reasoning and self._parser.in_reasoning
            if self.stopped:
                shown += self._seen(self._parser.close(is_cut=True))
                break
        self.num_tokens += num_read
        return self._part(shown, tokens.logprobs[:num_read])

    def rest(self, stop_token_id: int | None, reason: FinishReason) -> AnswerPart | None:
        tail = self._text.close(stop_token_id)
        is_cut = reason is not FinishReason.STOP
        return self._part(self._seen([*self._parser.push(tail), *self._parser.close(is_cut=is_cut)]), ())

    def end(self, reason: FinishReason) -> tuple[str, str | int | None]:
        return finish_reason(reason, has_tool_calls=self._has_tool_calls), self._text.stop_reason

    def _seen(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that belong to the answer: none after the first call where the client wants one at most."""
        kept: list[Piece] = []
        for piece in pieces:
            if self._single_call and self._has_tool_calls:
                break
            kept.append(piece)
            self._has_tool_calls = self._has_tool_calls or isinstance(piece, CallEnd)
        return kept

    def _part(self, pieces: list[Piece], logprobs: tuple[TokenLogprob, ...]) -> AnswerPart | None:
        return AnswerPart(tuple(joined(pieces)), logprobs) if pieces or logprobs else None
