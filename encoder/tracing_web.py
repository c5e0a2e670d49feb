"""The root of a trace: one span around every HTTP request that asks for work, below the client's own if it sent one.

`mimo.request` is the name whatever the route; what the route is, and how it ended, are attributes as OpenTelemetry's
conventions name them. GET requests (probes, scrapes, the page) are not traced.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from encoder.tracing import NO_SPAN, Carrier, Value, current, open_span, use

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/encode": "embeddings",
}


@web.middleware
async def trace_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost, so that refusals are seen as well."""
    if request.method != "POST":
        return await handler(request)
    root = open_span("mimo.request", parent=_carrier(request), kind="server", attributes=_attributes(request))
    if root is NO_SPAN:
        return await handler(request)
    try:
        with use(root):
            response = await handler(request)
        root.set({"http.response.status_code": response.status})
        if "X-Request-Id" in response.headers:
            root.set({"mimo.request.id": response.headers["X-Request-Id"]})
        return response
    except asyncio.CancelledError:
        root.set({"mimo.cancelled": True, "error.type": "client_closed_request"})
        raise
    except Exception as error:
        root.fail(type(error).__name__, str(error))
        raise
    finally:
        root.end()


def note_problem(code: str, status: int, message: str) -> None:
    """The request at hand is answered with an error; by convention those of the client are no errors of the server."""
    if status >= 500:
        current().fail(code, message)
    else:
        current().set({"error.type": code})


def _carrier(request: web.Request) -> Carrier:
    parents = request.headers.getall("traceparent", [])
    return Carrier.of_headers(parents[0], request.headers.getall("tracestate", [])) if len(parents) == 1 else Carrier()


def _attributes(request: web.Request) -> dict[str, Value]:
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical
    attributes: dict[str, Value] = {
        "http.request.method": request.method,
        "http.route": route,
        "url.path": request.path,
        "url.scheme": request.scheme,
    }
    if request.remote:
        attributes["client.address"] = request.remote
    agent = request.headers.get("User-Agent")
    if agent:
        attributes["user_agent.original"] = agent[:256]
    if route in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[route]
        attributes["gen_ai.provider.name"] = "mimo-epd"
    return attributes
