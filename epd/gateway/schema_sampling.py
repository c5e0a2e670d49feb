"""What requests for generated text have in common, whether they bring a conversation or a prompt.

The fields are those of OpenAI, and those of vLLM and SGLang that their users send. Each is honoured, or typed with the
values that mean what happens anyway: another value is an error that names it. Null is always the same as absent.
"""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from epd.gateway.schema_tools import Choices, SchemaOrText, StructuredOutputs
from epd.gateway.shape import TAG, Conflict, Shape, content_kind

_StopString = Annotated[str, Field(min_length=1, max_length=256)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1 and 0: all tokens."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[_StopString, Tag(f"{TAG}text")]
            | Annotated[list[_StopString], Field(fail_fast=True, max_length=16), Tag(f"{TAG}parts")],
            Discriminator(content_kind),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's word for `include_stop_str_in_output`."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Tokens of this vocabulary bring their own spaces; there is nothing to choose."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] | None = None
    """Divides the odds of what prompt and answer hold already; 1 changes nothing."""
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=1024)] | None = None
    """Token ids, as text, and what is added to their logits."""
    structured_outputs: StructuredOutputs | None = None
    # What vLLM called them before.
    guided_json: SchemaOrText | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    return_timings: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None
    # Of vLLM and SGLang: what means nothing else than what happens anyway.
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    early_stopping: Literal[False] | None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    allowed_token_ids: None = None
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None
    logits_processors: None = None
    priority: Literal[0] | None = None
    cache_salt: None = None
    kv_transfer_params: None = None
    vllm_xargs: None = None
    request_id: None = None
    return_token_ids: Literal[False] | None = None
    rid: None = None
    lora_path: None = None
    session_params: None = None
    custom_params: None = None
    custom_logit_processor: None = None
    return_hidden_states: Literal[False] | None = None
    stop_regex: None = None

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
