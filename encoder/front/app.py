"""The front's HTTP application: routes, keys, request ids. `POST /v1/encode` itself is `encoder.front.endpoint`."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from encoder.errors import EncoderError
from encoder.front.admission import Admission
from encoder.front.config import FrontConfig
from encoder.front.desk import EncodeDesk
from encoder.front.endpoint import EncodeEndpoint
from encoder.front.health import HealthBoard, Verdict
from encoder.front.metrics import FrontMetrics
from encoder.front.problems import Problem, Refused, internal_problem, problem_of
from encoder.quoting import shown
from encoder.tracing_web import note_problem, trace_requests
from preprocess.errors import MediaError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Not a status of HTTP but a custom among servers; it is never sent, only counted.
_CLIENT_CLOSED_REQUEST: Final = 499
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN_PATHS: Final = ("/health", "/ready", "/metrics", "/health_generate")
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


class Front:
    """The routes. Everything shared is handed in."""

    def __init__(
        self,
        config: FrontConfig,
        *,
        desk: EncodeDesk,
        board: HealthBoard,
        metrics: FrontMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives Unix seconds."""
        self._config = config
        self._desk = desk
        self._board = board
        self._metrics = metrics
        self._clock = clock
        self._created_unix_s = int(clock())
        self.admission = Admission(timeout_s=config.request_timeout_s)
        self._endpoint = EncodeEndpoint(config.encode_limits, desk=desk)
        metrics.inflight_requests.set_function(lambda: self.admission.num_inflight)
        metrics.inflight_media.set_function(lambda: desk.num_inflight)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[trace_requests, self._edge])
        app.add_routes(
            [
                web.post("/v1/encode", self._encode),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics_text),
            ]
        )
        return app

    @web.middleware
    async def _edge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Outermost: the request id, the API key, and every error as an OpenAI error object."""
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        request[REQUEST_ID] = request_id
        try:
            self._check_key(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _http_refusal(request, error)
        except Refused as error:
            response = _answer(error.problem)
        except (MediaError, EncoderError) as error:
            response = _answer(problem_of(error))
        except asyncio.CancelledError:
            self._metrics.disconnects.inc()
            self._count(request, _CLIENT_CLOSED_REQUEST)
            raise
        except Exception as error:
            # The outermost loop of a request: log, and end it.
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                self._metrics.disconnects.inc()
                response = web.Response(status=_CLIENT_CLOSED_REQUEST)
            else:
                logger.exception("request %s failed", request_id)
                response = _answer(internal_problem(request_id))
        self._count(request, response.status)
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
        return response

    def _count(self, request: web.Request, status: int) -> None:
        route = request.match_info.route.resource
        self._metrics.requests.labels(route.canonical if route else "unknown", str(status)).inc()

    async def _encode(self, request: web.Request) -> web.StreamResponse:
        started_s = time.monotonic()
        deadline_unix_s = self._clock() + self._config.request_timeout_s
        async with self.admission.session():
            response = await self._endpoint.answer(
                request, headers={"X-Request-Id": request[REQUEST_ID]}, deadline_unix_s=deadline_unix_s
            )
        if response.status == 200:
            self._metrics.seconds.observe(time.monotonic() - started_s)
        return response

    async def _models(self, _: web.Request) -> web.Response:
        card: dict[str, Any] = {
            "id": self._config.model_name,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "mimo-epd",
            "modalities": [modality.value for modality in self._desk.modalities],
            "width": self._desk.width,
            "dtype": self._desk.dtype,
        }
        return web.json_response({"object": "list", "data": [card]})

    # The door answers most probes itself; these are for connections that began with something else.

    async def _health(self, _: web.Request) -> web.Response:
        return _probe_response(self._board.health())

    async def _ready(self, _: web.Request) -> web.Response:
        return _probe_response(self._board.ready())

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _check_key(self, request: web.Request) -> None:
        """Every configured key is compared, each in constant time. Of all dialects only probes need none."""
        if not self._config.api_keys or request.path in _OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        candidate = given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        matches = [hmac.compare_digest(candidate, key.encode()) for key in self._config.api_keys]
        if not any(matches):
            words = "missing or wrong API key; send it as: Authorization: Bearer KEY"
            raise Refused(401, "invalid_api_key", words)


def _probe_response(verdict: Verdict) -> web.Response:
    headers = {"Retry-After": "1"} if verdict.status == 503 else {}
    return web.json_response(dict(verdict.body), status=verdict.status, headers=headers)


def _answer(problem: Problem) -> web.Response:
    note_problem(problem.code, problem.status, problem.message)
    return web.Response(
        body=problem.json_bytes(), status=problem.status, content_type="application/json", headers=problem.headers
    )


def _http_refusal(request: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp itself refuses: no such route, no such method."""
    match error:
        case web.HTTPNotFound():
            problem = Problem(404, "unknown_route", f"there is no route {shown(request.path)}")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            problem = Problem(405, "method_not_allowed", f"{request.path} takes {allowed}, not {shown(request.method)}")
        case _:
            problem = Problem(error.status, "http_error", error.reason)
    response = _answer(problem)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
