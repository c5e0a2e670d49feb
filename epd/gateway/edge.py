"""The edge of the API, around every request: its id, who asks and how often, what pages of browsers may, every error as
an OpenAI error object, and a line in the log.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress

from aiohttp import web

from encoder.tracing_web import note_problem
from epd.errors import InvalidRequest, ServeError, TooManyRequests
from epd.gateway.guesses import Guesses
from epd.gateway.keys import ApiKeys
from epd.gateway.metrics import GatewayMetrics
from epd.gateway.operations import Handler, Operation
from epd.gateway.origins import Origins
from epd.gateway.other_servers import route_instead
from epd.gateway.owner import owner_of, set_owner
from epd.gateway.problems import Problem, internal_problem, new_request_id, problem_of
from epd.gateway.rates import RateLimiter
from epd.gateway.sse import ANSWER_HEADERS, STREAM, EventStream
from epd.gateway.validation import shown

logger = logging.getLogger(__name__)
# One line per request, with its facts as fields for a log that is read by machines.
access = logging.getLogger("epd.gateway.access")

# Not a status of HTTP but a custom among servers; it is never sent, only counted.
_CLIENT_CLOSED_REQUEST = 499
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """The middleware of the application that has `operations`."""

    def __init__(
        self,
        *,
        keys: ApiKeys,
        limiter: RateLimiter,
        origins: Origins,
        metrics: GatewayMetrics,
        operations: Iterable[Operation],
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._guesses = Guesses(keys, clock=clock)
        self._limiter = limiter
        self._origins = origins
        self._metrics = metrics
        self._clock = clock
        listed = tuple(operations)
        self._paths = frozenset(operation.path for operation in listed)
        self._open_handlers = frozenset(operation.handler for operation in listed if operation.is_open)
        # Probes and pages may bring what keeps caches away.
        self._queries = {
            operation.handler: [parameter.name for parameter in operation.parameters if parameter.where == "query"]
            for operation in listed
            if not operation.is_open
        }

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Outermost of all that is done for a request."""
        started_s = self._clock()
        request_id = _request_id(request)
        request[ANSWER_HEADERS] = {"X-Request-Id": request_id, **self._origins.headers(request)}
        try:
            response = await self._let_in(request, handler)
        except web.HTTPException as error:
            response = _answer(self._http_problem(request, error), _allow_header(error))
        except ServeError as error:
            if isinstance(error, TooManyRequests):
                request[ANSWER_HEADERS].update(error.headers)
            response = await _refuse(request, problem_of(error))
        except asyncio.CancelledError:
            self._metrics.disconnects.inc()
            self._told(request, _CLIENT_CLOSED_REQUEST, started_s)
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
        self._told(request, response.status, started_s)
        if not response.prepared:
            response.headers.update(request[ANSWER_HEADERS])
        return response

    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, if this client may ask now."""
        if (response := self._origins.preflight(request)) is not None:
            return response
        self._origins.check(request)
        await self._check_key(request)
        with self._place(request) as headers:
            request[ANSWER_HEADERS].update(headers)
            self._check_query(request)
            return await handler(request)

    def _check_query(self, request: web.Request) -> None:
        """Raises InvalidRequest for a parameter that the operation does not have."""
        known = self._queries.get(request.match_info.handler)
        unknown = None if known is None else next((name for name in request.query if name not in known), None)
        if unknown is not None:
            allowed = ", ".join(known or ()) or "none"
            raise InvalidRequest(f"unknown query parameter {shown(unknown)}; allowed: {allowed}", param=unknown)

    def _place(self, request: web.Request) -> AbstractContextManager[Mapping[str, str]]:
        """Limits are for what costs something: looking is free."""
        if not self._limiter.is_on or request.method in ("GET", "HEAD", "OPTIONS"):
            return nullcontext({})
        return self._limiter.place(owner_of(request) or request.remote or "")

    async def _check_key(self, request: web.Request) -> None:
        """Raises InvalidApiKey, and TooManyRequests for many wrong ones."""
        match = request.match_info
        is_unknown = match.http_exception is not None and not request.path.startswith("/v1/")
        if not self._keys.are_asked_for or is_unknown or match.handler in self._open_handlers:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        candidate = given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        await self._guesses.check(candidate, request.remote or "")
        set_owner(request, candidate)

    def _told(self, request: web.Request, status: int, started_s: float) -> None:
        """Count the request, and log it. Probes, whatever they are told, and looks that succeed are for debugging."""
        route = request.match_info.route.resource
        self._metrics.requests.labels(route.canonical if route else "unknown", str(status)).inc()
        is_probe = request.match_info.handler in self._open_handlers
        level = logging.DEBUG if is_probe or (request.method == "GET" and status < 400) else logging.INFO
        if access.isEnabledFor(level):
            facts = {
                "request_id": request[ANSWER_HEADERS]["X-Request-Id"],
                "method": request.method,
                "path": request.path,
                "status": status,
                "seconds": round(self._clock() - started_s, 6),
                "remote": request.remote,
                # A digest of the key, cut short: enough to tell clients apart.
                "client": owner_of(request)[:8],
            }
            access.log(
                level,
                "%(method)s %(path)r %(status)d in %(seconds).3f s from %(remote)s, request %(request_id)s",
                facts,
                extra={"facts": facts},
            )

    def _http_problem(self, request: web.Request, error: web.HTTPException) -> Problem:
        """What aiohttp itself refuses: no such route, no such method."""
        match error:
            case web.HTTPNotFound():
                instead = route_instead(request.path, self._paths)
                hint = "" if instead is None else f"; use {instead}"
                return Problem(404, "unknown_route", f"there is no route {request.path}{hint}")
            case web.HTTPMethodNotAllowed():
                allowed = ", ".join(sorted(error.allowed_methods))
                return Problem(405, "method_not_allowed", f"{request.path} takes {allowed}, not {request.method}")
            case _:
                return Problem(error.status, "http_error", error.reason)


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


def _allow_header(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
