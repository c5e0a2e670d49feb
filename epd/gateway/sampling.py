"""The fields of a request that say how to draw its tokens, as workers take them."""

import secrets
from collections.abc import Callable

from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.detokenize import AnswerText
from epd.gateway.render import Renderer, fit_answer
from epd.gateway.schema_sampling import GenerationBody
from epd.gateway.validation import shown
from epd.types import SamplingParams


def check_choices(body: GenerationBody, config: GatewayConfig) -> None:
    """Raises InvalidRequest for more choices than this server makes of one request."""
    if body.num_choices > config.max_choices:
        raise InvalidRequest(
            f"n is {body.num_choices}; allowed: 1 to {config.max_choices} (gateway.max_choices)", param="n"
        )


def sampling_of_choices(
    body: GenerationBody,
    renderer: Renderer,
    *,
    num_prompt_tokens: int,
    token_limit: int | None,
    default_tokens: int,
    num_top_logprobs: int | None,
    max_context_tokens: int,
    prompt_param: str = "messages",
    grammar: str | None = None,
) -> Callable[[int], SamplingParams]:
    """How choice i is drawn: with the seed i after the request's own. Without a seed every request draws one.

    `token_limit` is what the client set; `grammar` what the text must fit. Raises InvalidRequest, ContextTooLong.
    """
    _check_stop_tokens(body, renderer)
    defaults = renderer.defaults
    max_tokens = fit_answer(
        num_prompt_tokens,
        asked=token_limit,
        default=default_tokens,
        max_context_tokens=max_context_tokens,
        model_context_tokens=renderer.max_context_tokens,
        prompt_param=prompt_param,
    )
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}; allowed: at most max_tokens, which is {max_tokens}", param="min_tokens"
        )
    top_k = defaults.top_k if body.top_k is None else body.top_k
    seed = secrets.randbits(63) if body.seed is None else body.seed
    # A grammar ends the answer with one of them where nothing else can come.
    eos_token_ids = () if body.ignore_eos and grammar is None else renderer.eos_token_ids
    logit_bias = _read_bias(body, renderer)

    def of_choice(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=top_k if top_k is not None and top_k > 0 else None,
            seed=seed + index,
            stop_token_ids=tuple(dict.fromkeys((*eos_token_ids, *(body.stop_token_ids or ())))),
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=num_top_logprobs,
            grammar=grammar,
            logit_bias=logit_bias,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            min_p=body.min_p or 0.0,
        )

    return of_choice


def answer_text(body: GenerationBody, renderer: Renderer) -> AnswerText:
    """What turns one choice's tokens to text, and stops it where the client says."""
    return AnswerText(
        renderer.vocabulary.token_bytes,
        stops=body.stop_strings,
        stop_token_ids=body.stop_token_ids or (),
        min_tokens=body.min_tokens or 0,
        shows_stop=body.shows_stop,
        shows_hidden=body.skip_special_tokens is False,
    )


def _check_stop_tokens(body: GenerationBody, renderer: Renderer) -> None:
    num_token_ids = renderer.vocabulary.num_token_ids
    for i, token_id in enumerate(body.stop_token_ids or ()):
        if token_id >= num_token_ids:
            name = f"stop_token_ids[{i}]"
            raise InvalidRequest(
                f"{name} is {token_id}; allowed: 0 to {num_token_ids - 1}, the ids of this model's tokens", param=name
            )


def _read_bias(body: GenerationBody, renderer: Renderer) -> tuple[tuple[int, float], ...]:
    most = renderer.vocabulary.num_token_ids - 1
    for text in body.logit_bias or ():
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
            raise InvalidRequest(
                f"logit_bias has the key {shown(text)}; allowed: 0 to {most}, the ids of this model's tokens, as text",
                param="logit_bias",
            )
    return tuple((int(text), value) for text, value in (body.logit_bias or {}).items() if value != 0)
