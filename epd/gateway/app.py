"""The HTTP application: routes, admission, keys, request ids. The story of a completion is in `chat.py`."""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from epd.config import GatewayConfig
from epd.errors import InvalidApiKey, ModelNotFound, ServeError
from epd.gateway.admission import Admission
from epd.gateway.body import SMALL_BODY_BYTES, BodyReader
from epd.gateway.chat import ChatService
from epd.gateway.connection import ApiServer
from epd.gateway.media import Encoder, MediaFetcher, MediaStage
from epd.gateway.metrics import STAGE_OF_ROLE, GatewayMetrics
from epd.gateway.problems import Problem, internal_problem, problem_of
from epd.gateway.render import Renderer
from epd.gateway.reply import AnswerEnd, AnswerPart, ReplyWriter
from epd.gateway.sse import ANSWER_HEADERS, EventStream
from epd.gateway.validation import read_chat_body, shown
from epd.router.workers import Fleet
from epd.transport.base import Channel

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = AsyncGenerator[AnswerPart | AnswerEnd, None]

# Not a status of HTTP but a custom among servers; it is never sent, only counted.
_CLIENT_CLOSED_REQUEST = 499
_STREAM: web.RequestKey[EventStream] = web.RequestKey("stream", EventStream)

# What is left to write after the drain: last events of streams, bodies of refusals.
_LAST_WORDS_S = 2.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(
    config: GatewayConfig,
    *,
    renderer: Renderer,
    fetcher: MediaFetcher,
    encoder: Encoder,
    prefill: Sequence[Channel],
    decode: Sequence[Channel] = (),
    clock: Callable[[], float] = time.monotonic,
    unix_clock: Callable[[], float] = time.time,
) -> web.Application:
    """The gateway over what is handed in. The channels are opened when the app starts and closed when it stops;
    `fetcher` and `encoder` belong to the caller. Serve it with `start_gateway`, which notices a client that leaves.
    """
    fleet = Fleet(
        prefill=prefill, decode=decode, heartbeat_s=config.heartbeat_s, timeout_s=config.worker_timeout_s, clock=clock
    )
    metrics = GatewayMetrics(fleet=fleet, encoder_infos=encoder.infos)
    admission = Admission(
        max_inflight=config.max_inflight, timeout_s=config.request_timeout_s, on_change=metrics.inflight.set
    )
    media = MediaStage(
        fetcher=fetcher,
        encoder=encoder,
        processor=renderer.processor,
        clock=clock,
        # A gateway that stops waits for nobody: what is down then stays down.
        patience_s=lambda: 0.0 if admission.draining else config.restart_wait_s,
    )
    chat = ChatService(
        config=config, renderer=renderer, media=media, fleet=fleet, metrics=metrics, clock=clock, unix_clock=unix_clock
    )
    gateway = Gateway(config, chat=chat, fleet=fleet, encoder=encoder, metrics=metrics, admission=admission)
    app = web.Application(middlewares=[gateway.edge])
    app[_GATEWAY] = gateway
    app.add_routes(gateway.routes())

    async def run_stages(_: web.Application) -> AsyncIterator[None]:
        fleet.start()
        yield
        await fleet.stop()

    app.cleanup_ctx.append(run_stages)
    return app


async def start_gateway(app: web.Application, *, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner, whose `cleanup` drains and stops everything, and the port (the system's choice for
    0)."""
    runner = _GatewayRunner(
        app,
        # A client that leaves ends its request everywhere.
        handler_cancellation=True,
        # Compressed bodies are refused by their header; inflating them first would be work for nothing.
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=_LAST_WORDS_S,
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner, runner.addresses[0][1]


class _GatewayRunner(web.AppRunner):
    """Answers in flight end before the listening sockets close, so that new requests still hear why not."""

    async def _make_server(self) -> web.Server:
        return ApiServer.like(await super()._make_server())

    async def cleanup(self) -> None:
        await self.app[_GATEWAY].drain()
        await super().cleanup()


class Gateway:
    """The routes. Everything shared is handed in."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        chat: ChatService,
        fleet: Fleet,
        encoder: Encoder,
        metrics: GatewayMetrics,
        admission: Admission,
    ) -> None:
        self._config = config
        self._chat = chat
        self._fleet = fleet
        self._encoder = encoder
        self._metrics = metrics
        self._admission = admission
        self._bodies = BodyReader(max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        self._created_unix_s = int(chat.unix_clock())

    async def drain(self) -> None:
        """Refuse what is new, wait for nothing that is down, let answers go on for a while and then end them."""
        self._fleet.stop_waiting()
        await self._admission.drain(self._config.drain_s)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model}", self.model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics_text),
        ]

    @web.middleware
    async def edge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Outermost: the request id, the API key, and every error as an OpenAI error object."""
        request_id = _request_id(request)
        request[ANSWER_HEADERS] = {"X-Request-Id": request_id}
        try:
            self._check_key(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _answer(_http_problem(request, error), _allow_header(error))
        except ServeError as error:
            response = await _refuse(request, problem_of(error))
        except asyncio.CancelledError:
            self._metrics.disconnects.inc()
            raise
        except Exception as error:
            # The outermost loop of a request: log, and end it.
            if isinstance(error, ConnectionError) and _client_left(request):
                # A stream was being written; there is nobody to answer any more.
                self._metrics.disconnects.inc()
                response = web.Response(status=_CLIENT_CLOSED_REQUEST)
            else:
                logger.exception("request %s failed", request_id)
                response = await _refuse(request, internal_problem(request_id))
        route = request.match_info.route.resource
        self._metrics.requests.labels(route.canonical if route else "unknown", str(response.status)).inc()
        if not response.prepared:
            response.headers.update(request[ANSWER_HEADERS])
        return response

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        async with self._admission.session():
            # Known to be in vain before the body is read, and looked at again once it is there.
            self._admission.check()
            raw = await self._bodies.read(request)
            with self._admission.place():
                return await self._complete(request, raw)

    async def _complete(self, request: web.Request, raw: bytearray) -> web.StreamResponse:
        if len(raw) <= SMALL_BODY_BYTES:
            body = read_chat_body(raw, self._config)
        else:
            body = await asyncio.to_thread(read_chat_body, raw, self._config)
        if body.model != self._config.model_name:
            raise self._unknown_model(body.model)
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

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._config.model_name:
            raise self._unknown_model(name)
        return web.json_response(self._model_card())

    async def health(self, _: web.Request) -> web.Response:
        """The process lives; says nothing of the stages."""
        return web.json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """200 when every process of every stage takes work, else 503 and why, by stage."""
        if self._admission.draining:
            return web.json_response({"status": "draining"}, status=503)
        stages: dict[str, list[str]] = {}
        for role in self._fleet.roles:
            reasons = (self._fleet.why_not_ready(worker) for worker in self._fleet.of_role(role))
            stages[STAGE_OF_ROLE[role]] = [reason for reason in reasons if reason is not None]
        encoders = self._encoder.infos()
        stages["encoder"] = [f"{name}: not up" for name, info in encoders.items() if info is None or not info.ready]
        missing = {stage: reasons for stage, reasons in stages.items() if reasons}
        status = {"status": "waiting", "waiting_for": missing} if missing else {"status": "ready"}
        return web.json_response(status, status=503 if missing else 200)

    async def metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _whole(self, answer: Answer, writer: ReplyWriter) -> web.Response:
        async with aclosing(answer) as parts:
            async for part in parts:
                if isinstance(part, AnswerEnd):
                    return web.json_response(writer.message(part), dumps=_dumps)
                writer.add(part)
        raise RuntimeError("an answer ended without its end")

    async def _stream(
        self, request: web.Request, answer: Answer, writer: ReplyWriter, *, include_usage: bool
    ) -> web.StreamResponse:
        """A fault before the first event is an ordinary error; after it, the last event (see `_refuse`)."""
        stream = request[_STREAM] = EventStream(request)
        async with self._admission.deadline():
            await self._send_events(stream, answer, writer, include_usage=include_usage)
        return await stream.finish()

    async def _send_events(
        self, stream: EventStream, answer: Answer, writer: ReplyWriter, *, include_usage: bool
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

    def _check_key(self, request: web.Request) -> None:
        """Raises InvalidApiKey. Every configured key is compared, each in constant time."""
        if not self._config.api_keys or not request.path.startswith("/v1/"):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        candidate = given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        matches = [hmac.compare_digest(candidate, key.encode()) for key in self._config.api_keys]
        if not any(matches):
            raise InvalidApiKey("missing or wrong API key; send it as: Authorization: Bearer KEY")

    def _unknown_model(self, name: str) -> ModelNotFound:
        return ModelNotFound(
            f"model {shown(name)} is not served here; served: {shown(self._config.model_name)}", param="model"
        )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "mimo-epd",
            "max_model_len": self._chat.max_context_tokens,
        }


_GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)


def _client_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _request_id(request: web.Request) -> str:
    """The client's own id when it is a sane one, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


async def _refuse(request: web.Request, problem: Problem) -> web.StreamResponse:
    """Tell the client: as the whole answer, or as the last event of a stream that has begun."""
    stream: EventStream | None = request.get(_STREAM)
    begun = None if stream is None else stream.response
    if stream is None or begun is None:
        return _answer(problem)
    logger.info("a stream ends with an error: %s", problem.message)
    with suppress(ConnectionError):
        await stream.send(problem.body)
        await stream.close()
    return begun


def _answer(problem: Problem, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=problem.json_bytes(),
        status=problem.status,
        content_type="application/json",
        headers={**problem.headers, **(headers or {})},
    )


def _http_problem(request: web.Request, error: web.HTTPException) -> Problem:
    """What aiohttp itself refuses: no such route, no such method."""
    match error:
        case web.HTTPNotFound():
            return Problem(404, "unknown_route", f"there is no route {request.path}")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return Problem(405, "method_not_allowed", f"{request.path} takes {allowed}, not {request.method}")
        case _:
            return Problem(error.status, "http_error", error.reason)


def _allow_header(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
