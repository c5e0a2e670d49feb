"""What aiohttp answers by itself, before any route is known: a request that is no HTTP. Here in the API's own words."""

import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from epd.gateway.problems import Problem, new_request_id

logger = logging.getLogger(__name__)


class ApiConnection(RequestHandler):
    """One connection. Broken requests are the client's fault: one line in the log, no traceback."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        # The first line says what is wrong, the others show the bytes with a pointer under them.
        what = (message or "it cannot be read").strip().partition("\n")[0].rstrip(":")
        logger.info("a request from %s is no HTTP: %s", request.remote, what)
        problem = Problem(status, "malformed_request", f"the request is not valid HTTP: {what}")
        headers = {"X-Request-Id": new_request_id()}
        response = web.Response(
            body=problem.json_bytes(), status=status, content_type="application/json", headers=headers
        )
        response.force_close()
        return response


class ApiServer(web.Server):
    """A server whose connections are `ApiConnection`."""

    @classmethod
    def like(cls, server: web.Server) -> "ApiServer":
        """The same application and settings."""
        return cls(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )

    def __call__(self) -> RequestHandler:
        return ApiConnection(self, loop=self._loop, **self._kwargs)
