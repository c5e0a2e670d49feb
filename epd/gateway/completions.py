"""`POST /v1/chat/completions` as HTTP: body in, one JSON answer or a stream of events out. What happens in between is
told in `chat.py`."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from epd.config import GatewayConfig
from epd.gateway.admission import Admission
from epd.gateway.answer_shapes import ChatCompletion, ChatCompletionChunk
from epd.gateway.body import SMALL_BODY_BYTES, BodyReader
from epd.gateway.chat import ChatService
from epd.gateway.examples import CHAT
from epd.gateway.operations import Answer, Operation
from epd.gateway.reply import AnswerEnd, AnswerPart, ReplyWriter
from epd.gateway.schema import ChatBody
from epd.gateway.sse import STREAM, EventStream
from epd.gateway.validation import read_body, unknown_model

_Parts = AsyncGenerator[AnswerPart | AnswerEnd, None]


class ChatCompletions:
    """Everything shared is handed in."""

    def __init__(self, config: GatewayConfig, *, chat: ChatService, admission: Admission, bodies: BodyReader) -> None:
        self._config = config
        self._chat = chat
        self._admission = admission
        self._bodies = bodies

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="POST",
                path="/v1/chat/completions",
                handler=self.chat_completions,
                tag="chat",
                summary="Answer a conversation",
                request=ChatBody,
                examples=CHAT,
                responses={
                    200: Answer(
                        description="The answer, whole or as a stream of events",
                        shape=ChatCompletion,
                        events=ChatCompletionChunk,
                    )
                },
                errors=(404, 422, 429, 502, 504),
            ),
        )

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        async with self._admission.session():
            # Known to be in vain before the body is read, and looked at again once it is there.
            self._admission.check()
            raw = await self._bodies.read(request)
            with self._admission.place():
                return await self._complete(request, raw)

    async def _complete(self, request: web.Request, raw: bytearray) -> web.StreamResponse:
        if len(raw) <= SMALL_BODY_BYTES:
            body = read_body(raw, ChatBody, self._config)
        else:
            body = await asyncio.to_thread(read_body, raw, ChatBody, self._config)
        if body.model != self._config.model_name:
            raise unknown_model(body.model, self._config)
        writer = ReplyWriter(
            completion_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=self._config.model_name,
            created_unix_s=int(self._chat.unix_clock()),
            vocabulary=self._chat.renderer.vocabulary,
            with_logprobs=bool(body.logprobs),
        )
        parts = self._chat.answer(body, writer.completion_id)
        if body.stream:
            include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return await self._stream(request, parts, writer, include_usage=include_usage)
        async with self._admission.deadline():
            return await self._whole(parts, writer)

    async def _whole(self, answer: _Parts, writer: ReplyWriter) -> web.Response:
        async with aclosing(answer) as parts:
            async for part in parts:
                if isinstance(part, AnswerEnd):
                    return web.json_response(writer.message(part), dumps=_dumps)
                writer.add(part)
        raise RuntimeError("an answer ended without its end")

    async def _stream(
        self, request: web.Request, answer: _Parts, writer: ReplyWriter, *, include_usage: bool
    ) -> web.StreamResponse:
        """A fault before the first event is an ordinary error; after it, the last event (see `epd.gateway.edge`)."""
        stream = request[STREAM] = EventStream(request)
        async with self._admission.deadline():
            await self._send_events(stream, answer, writer, include_usage=include_usage)
        return await stream.finish()

    async def _send_events(
        self, stream: EventStream, answer: _Parts, writer: ReplyWriter, *, include_usage: bool
    ) -> None:
        async with aclosing(answer) as parts:
            async for part in parts:
                if stream.response is None:
                    await stream.send(writer.first_chunk())
                if isinstance(part, AnswerEnd):
                    await stream.send(writer.last_chunk(part))
                    if include_usage:
                        await stream.send(writer.usage_chunk(part))
                    return
                for chunk in writer.chunks(part):
                    await stream.send(chunk)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
