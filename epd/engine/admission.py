"""What a worker can take at all: checked once, before a request waits for anything."""

from dataclasses import dataclass

from epd.engine.plan import Failure
from epd.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_context_tokens` is the smaller of the model's positions and what the full pool holds at once."""

    max_context_tokens: int
    vocab_size: int
    hidden_size: int
    max_waiting: int


def refusal(request: GenerateRequest, limits: Limits) -> Failure | None:
    """Why the request can never be served here, or None."""
    return _length_refusal(request, limits) or _token_refusal(request, limits) or _media_refusal(request, limits)


def _length_refusal(request: GenerateRequest, limits: Limits) -> Failure | None:
    num_prompt = len(request.token_ids)
    num_left = request.sampling.max_tokens - request.num_emitted
    if num_prompt == 0:
        return _invalid("the prompt is empty")
    if num_left < 1:
        return _invalid(
            f"max_tokens is {request.sampling.max_tokens}, {request.num_emitted} of them were sent: none is left"
        )
    if num_prompt + num_left > limits.max_context_tokens:
        return Failure(
            status=400,
            code="context_length_exceeded",
            message=f"prompt of {num_prompt} tokens and up to {num_left} new tokens are {num_prompt + num_left}, "
            f"this worker's context holds {limits.max_context_tokens}",
        )
    return None


def _token_refusal(request: GenerateRequest, limits: Limits) -> Failure | None:
    outside = next((token for token in request.token_ids if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        return _invalid(f"token id {outside} is outside the vocabulary of {limits.vocab_size}")
    return None


def _media_refusal(request: GenerateRequest, limits: Limits) -> Failure | None:
    free_from = 0
    for span in sorted(request.spans, key=lambda span: span.start):
        where = f"media span [{span.start}, {span.stop})"
        if not free_from <= span.start < span.stop <= len(request.token_ids):
            return _invalid(f"{where} overlaps another or leaves the {len(request.token_ids)} prompt tokens")
        free_from = span.stop
        if not span.key:
            return _invalid(f"{where} has no key")
        if not 0 <= span.media < len(request.embeddings):
            return _invalid(f"{where} names medium {span.media} of {len(request.embeddings)}")
        ref = request.embeddings[span.media]
        row_stop = span.row_start + span.stop - span.start
        if span.row_start < 0 or row_stop > ref.num_rows:
            return _invalid(f"{where} takes rows [{span.row_start}, {row_stop}), its embedding has {ref.num_rows}")
        if ref.width != limits.hidden_size:
            return _invalid(f"{where} has embedding rows of width {ref.width}, the model's is {limits.hidden_size}")
    return None


def _invalid(message: str) -> Failure:
    return Failure(status=400, code="invalid_request", message=message)
