"""What the gateway adds to the trace of a request: a span for each attempt, and at the end what the receipt says.

mimo.request                      see `encoder.tracing_web`
  mimo.gateway.render, ...        the gateway's own steps, from the receipt
  mimo.media.fetch                one for each medium that is fetched
  mimo.encode                     one for each medium, see `encoder.client`
  mimo.generate                   one for each attempt of each choice; workers' spans are its children
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from encoder.tracing import Carrier, Record, Span, Value, current, open_span, report
from epd.errors import ServeError
from epd.gateway.problems import problem_of
from epd.gateway.receipt import Receipt, Step
from epd.types import GenerateRequest

# Steps of the gateway that are spans of their own; `dispatch` is the beginning of `mimo.generate`.
_STEPS: Final = ("read", "parse", "render", "encoder", "assemble", "prefix_wait")


@contextmanager
def attempt_span(
    base: GenerateRequest, number: int, *, item: str = "", after: Carrier | None = None, because: str = ""
) -> Iterator[Span]:
    """Around attempt `number` of a choice (`item`, empty for the only one). A later attempt is linked to the one
    `after` which it comes, and the request's span says `because` of what."""
    sampling = base.sampling
    attributes: dict[str, Value] = {
        "mimo.attempt.id": f"{base.request_id}#{number}",
        "mimo.attempt.number": number,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
    }
    if item:
        attributes["mimo.choice"] = item
    if number > 1:
        current().event("mimo.retry", {"mimo.attempt.number": number, "mimo.retry.reason": because})
    links = [] if after is None else [after]
    opened = open_span("mimo.generate", kind="client", attributes=attributes, links=links)
    try:
        yield opened
    except ServeError as error:
        problem = problem_of(error)
        opened.fail(problem.code, problem.message)
        raise
    except asyncio.CancelledError:
        opened.set({"mimo.cancelled": True})
        raise
    except GeneratorExit:
        # The answer is complete before the worker thinks so: a stop string, or the other choices failed.
        opened.set({"mimo.stopped": True})
        raise
    finally:
        opened.end()


def trace_receipt(receipt: Receipt) -> None:
    """Put what is known of a request at its end on its span, and make spans of the gateway's own steps."""
    root = current()
    if not root.is_recording:
        return
    cache = receipt.cache_tokens
    attributes: dict[str, Value] = {
        "gen_ai.request.model": receipt.model,
        "gen_ai.response.model": receipt.model,
        "gen_ai.response.id": receipt.request_id,
        "gen_ai.request.choice.count": receipt.num_choices,
        "gen_ai.response.finish_reasons": (receipt.finish_reason,),
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.output_tokens": receipt.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": cache.l1 + cache.l2 + cache.l3,
        "mimo.cache.l1_tokens": cache.l1,
        "mimo.cache.l2_tokens": cache.l2,
        "mimo.cache.l3_tokens": cache.l3,
        "mimo.cache.healed_tokens": cache.healed,
        "mimo.reasoning_tokens": receipt.reasoning_tokens,
        "mimo.media.count": receipt.num_media,
        "mimo.media.cached_count": receipt.cached_media,
        "mimo.attempts": receipt.num_attempts,
    }
    attributes |= {f"mimo.media.{kind}_tokens": count for kind, count in receipt.media_tokens.items()}
    if receipt.first_token_s is not None:
        attributes["mimo.time_to_first_token_s"] = receipt.first_token_s
    root.set(attributes)
    steps = [record for step in receipt.steps if (record := _record(step, receipt.arrival_unix_s)) is not None]
    report(root.carrier.traceparent, root.carrier.tracestate, steps)


def _record(step: Step, arrival_unix_s: float) -> Record | None:
    if step.stage != "gateway" or step.name not in _STEPS:
        return None
    return Record(
        name=f"mimo.gateway.{step.name}",
        start_unix_s=arrival_unix_s + step.start_s,
        stop_unix_s=arrival_unix_s + step.stop_s,
        attributes={"mimo.request.part": step.item} if step.item else {},
    )
