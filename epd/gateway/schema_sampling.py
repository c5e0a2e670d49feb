"""What requests for generated text have in common, whether they bring a conversation or a prompt.

The fields are those of OpenAI, and those of vLLM and SGLang that their users send. Each is honoured, or typed with the
values that mean what happens anyway: another value is an error that names it. Null is always the same as absent.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.schema_tools import Choices, SchemaOrText, StructuredOutputs
from epd.gateway.shape import TAG, Conflict, EmptyList, EmptyObject, Shape, content_kind

_StopString = Annotated[str, Field(min_length=1, max_length=256)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TOKEN_ID = "token-id"
"""Marks ids of tokens in JSON schemas, whose bound is the model's."""
TokenId = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"format": TOKEN_ID})]
MAX_LOGPROBS = 20
"""Alternatives per token."""


class StreamOptions(Shape):
    """`include_usage` asks for an event with the usage after the last choice, `continuous_usage_stats` for the usage so
    far in every event. `include_obfuscation` would pad events."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Shape):
    """Fields of both ways to ask. Those that are only null or one value are of other servers and say nothing here."""

    model: str
    """The model that is served."""
    stream: bool | None = None
    """The answer comes as events while it is written."""
    stream_options: StreamOptions | None = None
    """What the events of a stream have besides."""
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """How many answers."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of each answer, reasoning included."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The answer neither ends nor stops before so many tokens."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """How freely tokens are drawn; 0 takes the most probable."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only the most probable tokens are drawn that together have this probability."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Only so many of the most probable tokens are drawn; -1 and 0: all."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same seed draws the same tokens again."""
    stop: (
        Annotated[
            Annotated[_StopString, Tag(f"{TAG}text")]
            | Annotated[list[_StopString], Field(fail_fast=True, max_length=16), Tag(f"{TAG}parts")],
            Discriminator(content_kind),
        ]
        | None
    ) = None
    """The answer ends before any of these texts."""
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    """These tokens end the answer as the model's own do."""
    include_stop_str_in_output: bool | None = None
    """What stopped the answer is shown."""
    no_stop_trim: bool | None = None
    """SGLang's word for `include_stop_str_in_output`."""
    ignore_eos: bool | None = None
    """The model's own end tokens do not end the answer."""
    skip_special_tokens: bool | None = None
    """Whether special tokens inside the answer are left out; true when absent."""
    spaces_between_special_tokens: bool | None = None
    """Tokens of this vocabulary bring their own spaces; there is nothing to choose."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Only tokens are drawn that have this share of the most probable one's probability."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    """Subtracted from the odds of a token for each time that the answer has it."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    """Subtracted from the odds of a token that the answer has."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] | None = None
    """Divides the odds of what prompt and answer hold already; 1 changes nothing."""
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=1024)] | None = None
    """Token ids, as text, and what is added to their logits."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must look like."""
    # What vLLM called them before.
    guided_json: SchemaOrText | None = None
    """A JSON schema that the text must fit; `structured_outputs.json`."""
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that the whole text must match; `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """The texts of which the answer is one; `structured_outputs.choice`."""
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    """A grammar that the text must follow; `structured_outputs.grammar`."""
    return_timings: bool | None = None
    """The answer tells where its time went."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens of `logprobs` are written `token_id:7`."""
    service_tier: Literal["auto", "default"] | None = None
    """Both are answered as `default`."""
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """Prompts with the same key probably begin alike: their KV is stored together."""
    user: str | None = None
    """Taken, and without effect."""
    # Of vLLM and SGLang: what means nothing else than what happens anyway.
    use_beam_search: Literal[False] | None = None
    """There is no beam search."""
    length_penalty: Literal[1] | None = None
    """Of beam search: there is none."""
    early_stopping: Literal[False] | None = None
    """Of beam search: there is none."""
    prompt_logprobs: None = None
    """Tokens of a prompt have no log-probabilities here."""
    truncate_prompt_tokens: None = None
    """Prompts are not shortened."""
    allowed_token_ids: None = None
    """What may be drawn is said by a grammar or by `logit_bias`."""
    bad_words: EmptyList | None = None
    """No words are kept out."""
    logits_processors: EmptyList | None = None
    """No code of clients is run."""
    priority: Literal[0] | None = None
    """All requests have the same."""
    cache_salt: None = None
    """Prompts are shared by their tokens alone."""
    kv_transfer_params: EmptyObject | None = None
    """The server moves KV by itself."""
    vllm_xargs: EmptyObject | None = None
    """There are no plug-ins."""
    request_id: None = None
    """Goes into the header X-Request-Id."""
    return_token_ids: Literal[False] | None = None
    """`/tokenize` tells the ids of tokens."""
    rid: None = None
    """Goes into the header X-Request-Id."""
    lora_path: None = None
    """There are no adapters."""
    session_params: EmptyObject | None = None
    """There are no sessions."""
    custom_params: EmptyObject | None = None
    """There are no plug-ins."""
    custom_logit_processor: None = None
    """No code of clients is run."""
    return_hidden_states: Literal[False] | None = None
    """Hidden states stay in the server."""
    stop_regex: None = None
    """Only texts and tokens stop an answer."""

    @model_validator(mode="after")
    def _stream_options_agree(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise Conflict("stream_options", "stream_options is given; it needs stream to be true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def shows_stop(self) -> bool:
        """What stopped an answer is a part of it."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)
