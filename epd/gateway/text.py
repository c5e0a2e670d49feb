"""Completions of bare prompts, start to end:

    body -> prompts -> token ids -> submit -> tokens -> text

There is no chat template and no reading of what the answer means: text in, text out. In a prompt the spelling of a
special token is that token, as clients of such an API expect who write the template themselves. Only what stands for
media is refused, since no media come along.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from encoder.types import EmbeddingRef
from epd.errors import ContextTooLong, InvalidRequest
from epd.gateway.account import Account
from epd.gateway.answer import Content
from epd.gateway.chat import ChatService
from epd.gateway.choice import ChoiceRun, answer_of
from epd.gateway.generation import Tokens
from epd.gateway.grammar import Wish
from epd.gateway.render import Renderer, context_words
from epd.gateway.reply import AnswerEvent, AnswerPart, finish_reason
from epd.gateway.sampling import answer_text, sampling_of_choices
from epd.gateway.schema_completion import CompletionBody
from epd.gateway.wishes import form_of
from epd.types import FinishReason, GenerateRequest, TokenLogprob
from preprocess.types import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class TextService:
    """Shares everything with chats."""

    chat: ChatService

    async def answer(self, body: CompletionBody, account: Account) -> AsyncGenerator[AnswerEvent, None]:
        """As `ChatService.answer`. Choice j of prompt i has index i * n + j."""
        with account.measured("gateway", "render"):
            prompts = await asyncio.to_thread(self._token_ids, body)
            grammar = await self.chat.grammars.grammar(Wish(await asyncio.to_thread(form_of, body)))
        account.prompt_tokens = sum(map(len, prompts))
        runs = [run for i, token_ids in enumerate(prompts) for run in self._runs(body, account, i, token_ids, grammar)]
        answer = answer_of(
            runs,
            limit=self.chat.config.max_choices,
            account=account,
            metrics=self.chat.metrics,
            num_media_tokens=dict.fromkeys(Modality, 0),
        )
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    def _runs(
        self, body: CompletionBody, account: Account, i: int, token_ids: list[int], grammar: str | None
    ) -> list[ChoiceRun]:
        chat = self.chat
        sampling = sampling_of_choices(
            body,
            chat.renderer,
            num_prompt_tokens=len(token_ids),
            token_limit=body.max_tokens,
            default_tokens=16,
            num_top_logprobs=body.logprobs,
            max_context_tokens=chat.max_context_tokens,
            prompt_param="prompt",
            grammar=grammar,
        )
        base = GenerateRequest(
            request_id=account.request_id,
            token_ids=tuple(token_ids),
            sampling=sampling(0),
            arrival_unix_s=account.arrival_unix_s,
            deadline_unix_s=account.arrival_unix_s + chat.config.request_timeout_s,
            session=body.prompt_cache_key or "",
        )
        readers = [TextReader(chat.renderer, body) for _ in range(body.num_choices)]
        first_index = i * body.num_choices
        return chat.choices.of_prompt(
            base, sampling, readers, account, first_index=first_index, refresh=_no_refs, release=_release_nothing
        )

    def _token_ids(self, body: CompletionBody) -> list[list[int]]:
        """Raises InvalidRequest, ContextTooLong."""
        prompts, limit = body.prompts, self.chat.config.max_prompts
        if len(prompts) > limit:
            raise InvalidRequest(
                f"prompt has {len(prompts)} prompts; allowed: at most {limit} (gateway.max_prompts)", param="prompt"
            )
        is_one = len(prompts) == 1 and prompts[0] is body.prompt
        read = []
        for i, prompt in enumerate(prompts):
            param = "prompt" if is_one else f"prompt[{i}]"
            read.append(
                encode_text(self.chat, prompt, param=param, add_special=body.add_special_tokens is not False)
                if isinstance(prompt, str)
                else _checked(self.chat.renderer, prompt, param)
            )
        return read


def encode_text(chat: ChatService, text: str, *, param: str, add_special: bool) -> list[int]:
    """Ids of a bare prompt. `add_special`: begun and ended as the tokenizer says.

    Raises InvalidRequest for an empty one and for placeholders of media, ContextTooLong.
    """
    vocabulary, limit = chat.renderer.vocabulary, chat.max_context_tokens
    # Tokenising megabytes that cannot fit would cost seconds of a core.
    if (fewest := vocabulary.fewest_tokens(text)) > limit:
        words = context_words(limit, chat.renderer.max_context_tokens)
        raise ContextTooLong(f"{param} has at least {fewest} tokens; {words}, answer included", param=param)
    token_ids = vocabulary.encode(text)
    token_ids = vocabulary.framed(token_ids) if add_special else token_ids
    if not token_ids:
        raise InvalidRequest(f"{param} is empty; it must have at least one token", param=param)
    return _without_placeholders(chat.renderer, token_ids, param)


def _checked(renderer: Renderer, token_ids: list[int], param: str) -> list[int]:
    """Raises InvalidRequest for ids that are no tokens of the model."""
    num_token_ids = renderer.vocabulary.num_token_ids
    if max(token_ids) >= num_token_ids:
        i = next(i for i, token_id in enumerate(token_ids) if token_id >= num_token_ids)
        raise InvalidRequest(
            f"{param}[{i}] is {token_ids[i]}; allowed: 0 to {num_token_ids - 1}, the ids of this model's tokens",
            param=f"{param}[{i}]",
        )
    return _without_placeholders(renderer, token_ids, param)


def _without_placeholders(renderer: Renderer, token_ids: list[int], param: str) -> list[int]:
    found = next((token_id for token_id in token_ids if token_id in renderer.placeholder_ids), None)
    if found is not None:
        raise InvalidRequest(
            f"{param} has the token {found} ({renderer.placeholder_ids[found]}), which stands for media; this takes "
            "text only, and /v1/chat/completions takes media",
            param=param,
        )
    return token_ids


class TextReader:
    """Tokens of one choice to its text; see `ChoiceReader`."""

    num_reasoning_tokens = 0

    def __init__(self, renderer: Renderer, body: CompletionBody) -> None:
        self._text = answer_text(body, renderer)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._text.matched is not None

    def read(self, tokens: Tokens) -> AnswerPart | None:
        pieces: list[str] = []
        num_read = 0
        for token_id in tokens.token_ids:
            num_read += 1
            pieces.append(self._text.push(token_id))
            if self.stopped:
                break
        self.num_tokens += num_read
        return self._part("".join(pieces), tokens.logprobs[:num_read])

    def rest(self, stop_token_id: int | None, reason: FinishReason) -> AnswerPart | None:
        return self._part(self._text.close(stop_token_id), ())

    def end(self, reason: FinishReason) -> tuple[str, str | int | None]:
        return finish_reason(reason), self._text.stop_reason

    def _part(self, text: str, logprobs: Sequence[TokenLogprob]) -> AnswerPart | None:
        return AnswerPart((Content(text),) if text else (), tuple(logprobs)) if text or logprobs else None


async def _no_refs(_: bool) -> tuple[EmbeddingRef, ...]:
    return ()


def _release_nothing() -> None:
    """Bare prompts have no embeddings."""
