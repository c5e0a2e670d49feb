"""What the API can do: one `Operation` for each method and path. The routes are built from them, and so is the document
that describes them (`epd.gateway.openapi`), so the two cannot drift apart.

Every part of the API is a class with `operations()`; `epd.gateway.app` collects them. What an operation answers has a
shape in `epd.gateway.answer_shapes`, or in a module of its own beside the part: the tests compare every answer with it.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aiohttp import web
from pydantic import BaseModel

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Method = Literal["GET", "POST", "DELETE"]

ERRORS: Mapping[int, str] = {
    400: "The request makes no sense: the message names the field, its value and what is allowed",
    401: "No API key, or a wrong one",
    403: "Not for this API key, or not allowed on this server",
    404: "No such model, file or medium",
    405: "This path takes other methods",
    408: "The head or the body came too slowly",
    409: "The state of the thing does not allow it",
    413: "The body, or what it names, is larger than this server takes",
    415: "The body is not of the type this operation takes",
    417: "Expect is not 100-continue",
    422: "A medium cannot be decoded",
    429: "More requests than this API key may make",
    499: "The client left",
    500: "A fault of the server; its log has it under the request id",
    503: "Busy, or a stage is down; Retry-After says when to come back",
    504: "The answer was not complete in time",
}
"""Every status of an error answer, and when it is given. All have the same shape."""

# 400 is also the answer to what is no HTTP.
_ERRORS_OF_ALL = frozenset({400, 401, 403, 405, 417, 500})
# What costs something is limited, and so are wrong keys.
_ERRORS_OF_WORK = frozenset({429})
_ERRORS_OF_BODIES = frozenset({408, 413, 415, 503})


MEDIA_ERRORS = (404, 409, 413, 415, 422, 503, 504)
"""What an operation that reads media can answer besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of an operation. `shape` is a JSON body; `events` are those of a stream of the same status.

    `media_type` is for a body that is neither.
    """

    description: str
    shape: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    media_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormBody:
    """A multipart form: `shape` has its text fields, `files` names those that hold a file. With `is_any` one of them is
    enough, else all are required."""

    shape: type[BaseModel]
    files: tuple[str, ...] = ("file",)
    is_any: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A value in the path, the query or the headers. `schema` is a JSON schema; those in the path are required."""

    name: str
    where: Literal["path", "query", "header"]
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`path` is as aiohttp writes it. `errors` are statuses of `ERRORS` beyond those that all operations, or all with a
    body, can give."""

    method: Method
    path: str
    handler: Handler
    tag: str
    summary: str
    description: str = ""
    request: type[BaseModel] | FormBody | None = None
    form: FormBody | None = None
    """Where a JSON `request` may come as a form instead."""
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Bodies that work on every server, by name. `model` is left out: the document fills it in."""
    responses: Mapping[int, Answer]
    errors: tuple[int, ...] = ()
    error_shape: type[BaseModel] | None = None
    """Where errors may say more than `Error` does."""
    is_open: bool = False
    """No API key is needed."""
    parameters: tuple[Parameter, ...] = ()

    @property
    def error_statuses(self) -> list[int]:
        of_all = _ERRORS_OF_ALL - {401} if self.is_open else _ERRORS_OF_ALL
        of_body = frozenset[int]() if self.request is None else _ERRORS_OF_BODIES
        of_work = frozenset[int]() if self.method == "GET" and self.is_open else _ERRORS_OF_WORK
        return sorted((of_all | of_work | of_body | frozenset(self.errors)) - self.responses.keys())


class ApiPart(Protocol):
    """Some operations that belong together."""

    def operations(self) -> tuple[Operation, ...]: ...


def add_routes(app: web.Application, operations: Iterable[Operation]) -> None:
    """What can be got can be asked for by HEAD as well."""
    for operation in operations:
        app.router.add_route(operation.method, operation.path, operation.handler)
        if operation.method == "GET":
            app.router.add_route("HEAD", operation.path, operation.handler)
