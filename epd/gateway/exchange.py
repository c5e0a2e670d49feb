"""One request for generated text as HTTP: its body in, one JSON answer or a stream of events out, and its receipt.

    place -> body -> shape -> events of the answer -> JSON -> receipt

What is between the shape and the events is the caller's: see `completions` and `completions_text`.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from epd.config import GatewayConfig
from epd.errors import ServeError
from epd.gateway.account import Account
from epd.gateway.admission import Admission
from epd.gateway.body import SMALL_BODY_BYTES, BodyReader
from epd.gateway.owner import owner_of
from epd.gateway.problems import problem_of
from epd.gateway.receipt import Receipt
from epd.gateway.reply import AnswerEvent, ChoiceEnd, ReplyStyle, Writer
from epd.gateway.sampling import check_choices
from epd.gateway.schema_sampling import GenerationBody
from epd.gateway.sse import STREAM, EventStream
from epd.gateway.validation import read_body, unknown_model

Body = TypeVar("Body", bound=GenerationBody)
ReceiptSink = Callable[[Receipt, str], object]
"""Called with a receipt and whose it is."""


@dataclass(frozen=True, slots=True)
class Started:
    """An answer under way and how it is written."""

    events: AsyncGenerator[AnswerEvent, None]
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What all such requests share. `on_end` hears of every one that ends, however it does."""

    config: GatewayConfig
    admission: Admission
    bodies: BodyReader
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    on_end: ReceiptSink

    async def serve(
        self, request: web.Request, shape: type[Body], start: Callable[[Body, Account], Started], *, id_prefix: str
    ) -> web.StreamResponse:
        """The whole of it. `start` begins nothing before its events are asked for. Raises ServeError."""
        route = request.match_info.route.resource
        account = Account(
            request_id=f"{id_prefix}{uuid.uuid4().hex}",
            model=self.config.model_name,
            route="unknown" if route is None else route.canonical,
            arrival_unix_s=self.unix_clock(),
            clock=self.clock,
            started_s=self.clock(),
            owner=owner_of(request),
        )
        try:
            async with self.admission.session():
                return await self._admit(request, shape, start, account)
        except ServeError as error:
            account.failed(problem_of(error))
            raise
        except (asyncio.CancelledError, ConnectionError):
            account.left()
            raise
        finally:
            self.on_end(account.receipt(), account.owner)

    async def _admit(
        self, request: web.Request, shape: type[Body], start: Callable[[Body, Account], Started], account: Account
    ) -> web.StreamResponse:
        # Known to be in vain before the body is read, and looked at again once it is there.
        self.admission.check()
        with account.measured("gateway", "read"):
            raw = await self.bodies.read(request)
        with self.admission.place():
            with account.measured("gateway", "parse"):
                if len(raw) <= SMALL_BODY_BYTES:
                    body = read_body(raw, shape, self.config)
                else:
                    body = await asyncio.to_thread(read_body, raw, shape, self.config)
            if body.model != self.config.model_name:
                raise unknown_model(body.model, self.config)
            check_choices(body, self.config)
            account.num_choices = body.num_choices
            started = start(body, account)
            if body.stream:
                with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
                return await self._stream(request, started, with_usage=with_usage)
            async with self.admission.deadline():
                return await self._whole(started)

    async def _whole(self, started: Started) -> web.Response:
        async with aclosing(started.events) as events:
            async for event in events:
                started.writer.add(event)
                if isinstance(event, ChoiceEnd) and event.answer is not None:
                    return web.json_response(started.writer.message(event.answer), dumps=_dumps)
        raise RuntimeError("an answer ended without its end")

    async def _stream(self, request: web.Request, started: Started, *, with_usage: bool) -> web.StreamResponse:
        """A fault before the first event is an ordinary error; after it, the last event (see `epd.gateway.edge`)."""
        stream = request[STREAM] = EventStream(request)
        async with self.admission.deadline():
            await self._send_events(stream, started, with_usage=with_usage)
        return await stream.finish()

    async def _send_events(self, stream: EventStream, started: Started, *, with_usage: bool) -> None:
        writer = started.writer
        async with aclosing(started.events) as events:
            async for event in events:
                if stream.response is None:
                    for chunk in writer.opening():
                        await stream.send(chunk)
                for chunk in writer.chunks(event):
                    await stream.send(chunk)
                if isinstance(event, ChoiceEnd) and event.answer is not None:
                    if with_usage:
                        await stream.send(writer.usage_chunk(event.answer))
                    return


def style_of(
    body: GenerationBody, *, num_choices: int, with_logprobs: bool, system_fingerprint: Callable[[], str]
) -> ReplyStyle:
    """How the client wants its answer written. `num_choices` is of all prompts."""
    options = body.stream_options
    return ReplyStyle(
        num_choices=num_choices,
        with_logprobs=with_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        with_timings=bool(body.return_timings),
        with_usage=options is not None and bool(options.include_usage),
        with_running_usage=options is not None and bool(options.continuous_usage_stats),
        system_fingerprint=system_fingerprint,
        service_tier=body.service_tier,
    )


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
