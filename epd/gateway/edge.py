"""The edge of the API, around every request: its id, its API key, and every error as an OpenAI error object."""

import asyncio
import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from aiohttp import web

from encoder.tracing_web import note_problem
from epd.config import GatewayConfig
from epd.errors import InvalidApiKey, ServeError
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.operations import Handler, Operation
from epd.gateway.owner import set_owner
from epd.gateway.problems import Problem, internal_problem, new_request_id, problem_of
from epd.gateway.sse import ANSWER_HEADERS, STREAM, EventStream

logger = logging.getLogger(__name__)

# Not a status of HTTP but a custom among servers; it is never sent, only counted.
_CLIENT_CLOSED_REQUEST = 499
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """The middleware of the application that has `operations`."""

    def __init__(self, config: GatewayConfig, *, metrics: GatewayMetrics, operations: Iterable[Operation]) -> None:
        self._config = config
        self._metrics = metrics
        self._open_handlers = frozenset(operation.handler for operation in operations if operation.is_open)

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Outermost of all that is done for a request."""
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
            self._count(request, _CLIENT_CLOSED_REQUEST)
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
        self._count(request, response.status)
        if not response.prepared:
            response.headers.update(request[ANSWER_HEADERS])
        return response

    def _count(self, request: web.Request, status: int) -> None:
        route = request.match_info.route.resource
        self._metrics.requests.labels(route.canonical if route else "unknown", str(status)).inc()

    def _check_key(self, request: web.Request) -> None:
        """Raises InvalidApiKey. Every configured key is compared, each in constant time."""
        match = request.match_info
        is_unknown = match.http_exception is not None and not request.path.startswith("/v1/")
        if not self._config.api_keys or is_unknown or match.handler in self._open_handlers:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        candidate = given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        matches = [hmac.compare_digest(candidate, key.encode()) for key in self._config.api_keys]
        if not any(matches):
            raise InvalidApiKey("missing or wrong API key; send it as: Authorization: Bearer KEY")
        set_owner(request, candidate)


def _client_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _request_id(request: web.Request) -> str:
    """The client's own id when it is a sane one, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


async def _refuse(request: web.Request, problem: Problem) -> web.StreamResponse:
    """Tell the client: as the whole answer, or as the last event of a stream that has begun."""
    stream: EventStream | None = request.get(STREAM)
    note_problem(problem.code, problem.status, problem.message)
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
