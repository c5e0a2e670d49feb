"""Messages to token ids and media spans.

    messages -> template text -> pieces (text ids | medium) ... embeddings known ... -> token ids, spans

Text pieces between media are tokenised separately. A medium is the template's placeholder triple; the client's text is
guarded and can spell neither placeholders nor any other special token.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder.checkpoint import CheckpointError
from epd.errors import ContextTooLong, InvalidRequest
from epd.gateway.answer import THINK_CLOSE, THINK_OPEN
from epd.gateway.checkpoint import (
    check_end_tokens,
    read_config,
    read_generation,
    read_template,
    read_vocabulary,
)
from epd.gateway.conversation import Conversation
from epd.gateway.grammar import GrammarMaker
from epd.gateway.schema import THINKING_EFFORTS
from epd.gateway.template import ChatTemplate
from epd.gateway.vocabulary import Vocabulary
from epd.types import MediaSpan
from preprocess.config import ProcessorConfig
from preprocess.tokens import MediaTokenIds, expand
from preprocess.types import MediaKey, MediaLayout, Modality

_AUDIO_PLACEHOLDER = "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>"
_PADS = ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>")
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|mimo_audio_eod|>")
_PLACEHOLDER = re.compile(
    r"<\|vision_start\|>(?:(?P<image>(?:<\|image_pad\|>)+)|(?P<video>(?:<\|video_pad\|>)+))<\|vision_end\|>"
    r"|<\|mimo_audio_start\|>(?P<audio>(?:<\|audio_pad\|>)+)<\|mimo_audio_end\|>"
)


@dataclass(frozen=True, slots=True)
class MediaSlot:
    """Where a medium goes; `media` indexes the conversation's media."""

    media: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose media are not known yet."""

    pieces: tuple[tuple[int, ...] | MediaSlot, ...]
    opens_reasoning: bool
    """The text ends inside `<think>`, so the answer begins with reasoning."""
    grammar: str | None = None
    """What the answer must look like, for the workers; see `epd.gateway.grammar`."""

    @property
    def num_text_tokens(self) -> int:
        return sum(len(piece) for piece in self.pieces if not isinstance(piece, MediaSlot))


@dataclass(frozen=True, slots=True)
class AssembledPrompt:
    token_ids: tuple[int, ...]
    spans: tuple[MediaSpan, ...]
    num_media_tokens: Mapping[Modality, int]
    """Placeholders by what the medium is; the sound of a video counts as video."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json sets when a request is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        temperature = 0.0 if config.get("do_sample") is False else config.get("temperature")
        return cls(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=float(config.get("top_p") or 1.0),
            top_k=int(config["top_k"]) if config.get("top_k") else None,
        )


class Renderer:
    """One model's way from messages to tokens. Thread-safe."""

    def __init__(
        self,
        *,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
    ) -> None:
        """`config` is config.json, `generation` generation_config.json, empty if there is none. Raises ValueError."""
        self.vocabulary = vocabulary
        self.template = template
        self.defaults = SamplingDefaults.from_hf(generation)
        self.eos_token_ids = _eos_token_ids(config, generation, vocabulary, template.eos_token)
        self.grammars = GrammarMaker(vocabulary, self.eos_token_ids)
        self.max_context_tokens = int(config["max_position_embeddings"])
        # A text-only checkpoint has no processor; media are refused then.
        has_media = isinstance(config.get("processor_config"), Mapping)
        pads = {vocabulary.special_ids[pad]: pad for pad in _PADS if pad in vocabulary.special_ids}
        self.placeholder_ids: Mapping[int, str] = pads if has_media else {}
        """The tokens that stand for rows of media, and how they are spelled."""
        self.processor = ProcessorConfig.from_hf(config) if has_media else None
        self._media_ids = MediaTokenIds.from_hf(config) if has_media else None

    @classmethod
    def load(cls, model_dir: Path) -> "Renderer":
        """Raises CheckpointError naming the file for a directory that is no usable checkpoint."""
        path = model_dir / "config.json"
        config = read_config(model_dir)
        vocab_size = config["vocab_size"]
        check_end_tokens(path, config, vocab_size)
        vocabulary = read_vocabulary(model_dir, vocab_size)
        template, generation = read_template(model_dir), read_generation(model_dir, vocab_size)
        try:
            return cls(vocabulary=vocabulary, template=template, config=config, generation=generation)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def render(self, conversation: Conversation) -> Prompt:
        """Raises ContextTooLong, and InvalidRequest also when the template does not place every medium exactly once."""
        if conversation.tools and not self.template.renders_tools:
            raise InvalidRequest("tools: this model's chat template cannot declare tools", param="tools")
        if conversation.media and self.processor is None:
            raise InvalidRequest("this model takes text only", param=conversation.media[0].param)
        text = self.template.render(
            conversation.messages, tools=conversation.tools, options=self._options(conversation)
        )
        # Tokenising megabytes that cannot fit would cost seconds of a core.
        if (fewest := self.vocabulary.fewest_tokens(text)) > self.max_context_tokens:
            raise ContextTooLong(
                f"the text of the prompt has at least {fewest} tokens; this model's context is "
                f"{self.max_context_tokens} tokens, answer included",
                param="messages",
            )
        return Prompt(self._split(text, conversation), text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE))

    def _options(self, conversation: Conversation) -> Mapping[str, Any]:
        """The template's variables: those the client set, and what its effort means to this template."""
        effort = conversation.reasoning_effort
        if effort is None:
            return conversation.options
        meaning = {"reasoning_effort": effort, "enable_thinking": effort in THINKING_EFFORTS}
        with_tools = bool(conversation.tools)
        known = {name: value for name, value in meaning.items() if self.template.reads(name, with_tools=with_tools)}
        if not known:
            raise InvalidRequest(
                f'reasoning_effort is "{effort}"; this model\'s chat template has no way to say so',
                param="reasoning_effort",
            )
        return {**known, **conversation.options}

    def assemble(self, prompt: Prompt, media: Sequence[tuple[MediaKey, MediaLayout]]) -> AssembledPrompt:
        """Put the media in. `media` is in the order of the conversation's media."""
        token_ids: list[int] = []
        spans: list[MediaSpan] = []
        counts = dict.fromkeys(Modality, 0)
        for piece in prompt.pieces:
            if not isinstance(piece, MediaSlot):
                token_ids.extend(piece)
                continue
            key, layout = media[piece.media]
            ids, runs = self._expand(layout)
            for offset, length, row_start in runs:
                start = len(token_ids) + offset
                spans.append(
                    MediaSpan(start=start, stop=start + length, key=key, row_start=row_start, media=piece.media)
                )
            token_ids.extend(ids)
            counts[layout.modality] += layout.num_rows
        return AssembledPrompt(tuple(token_ids), tuple(spans), counts)

    def _expand(self, layout: MediaLayout) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Token ids of one medium, and (offset, length, first row) of its runs of placeholders that are not empty."""
        assert self._media_ids is not None, "a model without a processor was given media"
        assert self.processor is not None, "a model without a processor was given media"
        expansion = expand(
            layout, self._media_ids, self.vocabulary.encode_plain, interleave_s=self.processor.interleave_s
        )
        return expansion.token_ids, [(run.offset, run.length, run.row_start) for run in expansion.runs if run.length]

    def _split(self, text: str, conversation: Conversation) -> tuple[tuple[int, ...] | MediaSlot, ...]:
        """Text between placeholders to ids; the k-th placeholder of a modality is the k-th medium of that modality."""
        waiting: dict[Modality, list[int]] = {modality: [] for modality in Modality}
        for i, medium in enumerate(conversation.media):
            waiting[medium.source.modality].append(i)
        placeholders = [Modality(found.lastgroup or "") for found in _PLACEHOLDER.finditer(text)]
        if waiting[Modality.AUDIO] and Modality.AUDIO not in placeholders:
            text = _AUDIO_PLACEHOLDER + text
            placeholders.insert(0, Modality.AUDIO)
        for modality, media in waiting.items():
            if len(media) != placeholders.count(modality):
                raise InvalidRequest(
                    f"the request has {len(media)} {modality} parts, the chat template placed "
                    f"{placeholders.count(modality)}",
                    param=conversation.media[media[0]].param if media else "messages",
                )
        pieces: list[tuple[int, ...] | MediaSlot] = []
        at = 0
        for found, modality in zip(_PLACEHOLDER.finditer(text), placeholders, strict=True):
            if found.start() > at:
                pieces.append(tuple(self.vocabulary.encode(text[at : found.start()])))
            pieces.append(MediaSlot(waiting[modality].pop(0)))
            at = found.end()
        if at < len(text):
            pieces.append(tuple(self.vocabulary.encode(text[at:])))
        return tuple(pieces)


def context_words(max_context_tokens: int, model_context_tokens: int) -> str:
    """What limits a context: the model, or the memory that a deployment gives to keys and values."""
    if max_context_tokens >= model_context_tokens:
        return f"this model's context is {max_context_tokens} tokens"
    return (
        f"this server has room for {max_context_tokens} of the {model_context_tokens} tokens of this model's context "
        "(engine.kv_budget_bytes sets that)"
    )


def fit_answer(
    num_prompt_tokens: int,
    *,
    asked: int | None,
    default: int,
    max_context_tokens: int,
    model_context_tokens: int | None = None,
    prompt_param: str = "messages",
) -> int:
    """Tokens the answer may have. Raises ContextTooLong when the prompt, or both together, do not fit.

    `model_context_tokens` is the model's own limit, where `max_context_tokens` may be below it.
    """
    limit = context_words(max_context_tokens, model_context_tokens or max_context_tokens)
    room = max_context_tokens - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens; {limit}, answer included",
            param=prompt_param,
        )
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {asked}, together "
            f"{num_prompt_tokens + asked}; {limit}",
            param="max_tokens",
        )
    return min(default, room) if asked is None else asked


def _eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], vocabulary: Vocabulary, eos_token: str | None
) -> tuple[int, ...]:
    """Union of both files, of the tokenizer's own end token and of the model family's, in this order: any one source
    can miss some. What the tokenizer does not know cannot be written by the model."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    spelled = (*([] if eos_token is None else [eos_token]), *_END_TOKENS)
    ids.extend(vocabulary.special_ids[token] for token in spelled if token in vocabulary.special_ids)
    return tuple(dict.fromkeys(ids))
