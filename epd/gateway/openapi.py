"""`GET /openapi.json`: the document of this server's API (OpenAPI 3.1), made of the operations and of the shapes.

It says what this server does, with its own model, its limits and its keys, not what the software could do elsewhere.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from epd.config import GatewayConfig
from epd.gateway.answer_shapes import Error
from epd.gateway.operations import ERRORS, Answer, FormBody, Operation
from epd.gateway.schema_sampling import TOKEN_ID

_REF = "#/components/schemas/{model}"
_PATH_VARIABLE = re.compile(r"\{(\w+)(?::[^{}]*(?:\{[^{}]*\}[^{}]*)*)?\}")

_TAGS: Mapping[str, str] = {
    "chat": "Conversations with text, images, video and sound",
    "completions": "Texts that the model goes on with",
    "tokens": "Texts to tokens and back",
    "media": "Media without a conversation: their embeddings",
    "files": "Files kept here, to be named in requests",
    "models": "What is served",
    "status": "How the server is",
    "page": "The page in the browser",
}

_RETRY_AFTER = {
    "description": "Seconds after which it is worth to come back",
    "required": True,
    "schema": {"type": "string", "pattern": "^[1-9][0-9]*$"},
}
_RATE_HEADERS: Mapping[str, Any] = {
    "X-RateLimit-Limit-Requests": {
        "description": "Requests that this client may make in a minute",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "X-RateLimit-Remaining-Requests": {
        "description": "Requests that it may make now",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "X-RateLimit-Reset-Requests": {
        "description": "When it may make as many as ever",
        "schema": {"type": "string", "pattern": "^[0-9.]+s$"},
    },
}
_HEADERS: Mapping[str, Any] = {
    "X-Request-Id": {
        "description": "The id of this request, as the server's log has it: the client's own, or a new one",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    },
    "Retry-After": _RETRY_AFTER,
    "WWW-Authenticate": {
        "description": "How keys are sent",
        "required": True,
        "schema": {"type": "string", "enum": ["Bearer"]},
    },
    "Allow": {
        "description": "The methods that the path takes",
        "required": True,
        "schema": {"type": "string"},
    },
}


# Of answers that have no shape; all others are text or bytes.
_OTHER_BODIES: Mapping[str, Any] = {"application/json": {"type": "object"}, "*/*": {}}


class Document:
    """The operation that serves the document, which describes it as well."""

    def __init__(
        self, config: GatewayConfig, *, operations: Callable[[], Sequence[Operation]], num_token_ids: int
    ) -> None:
        """`operations` are those of the whole application; asked for once, at the first request."""
        self._config = config
        self._operations = operations
        self._num_token_ids = num_token_ids
        self._text: asyncio.Future[bytes] | None = None

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation(
                method="GET",
                path="/openapi.json",
                handler=self.openapi,
                tag="status",
                summary="This document",
                responses={200: Answer(description="The document", media_type="application/json")},
                is_open=True,
            ),
        )

    async def openapi(self, _: web.Request) -> web.Response:
        if self._text is None:
            self._text = asyncio.ensure_future(asyncio.to_thread(self._write))
        # Shielded: one client that leaves takes nobody's document away.
        return web.Response(body=await asyncio.shield(self._text), content_type="application/json")

    def _write(self) -> bytes:
        whole = document(self._operations(), self._config, num_token_ids=self._num_token_ids)
        return json.dumps(whole, ensure_ascii=False).encode()


def document(operations: Sequence[Operation], config: GatewayConfig, *, num_token_ids: int = 2**31) -> dict[str, Any]:
    """The whole document as JSON values. `num_token_ids` is what the model's vocabulary has."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PATH_VARIABLE.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, config)
    tags = dict.fromkeys(operation.tag for operation in operations)
    components: dict[str, Any] = {
        "schemas": _schemas(operations, config, num_token_ids),
        "responses": {f"Error{status}": _error(status) for status in ERRORS},
        "headers": {**_HEADERS, **(_RATE_HEADERS if config.requests_per_minute else {})},
    }
    if _asks_for_keys(config):
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "MiMo-EPD",
            "version": "1",
            "summary": "Text, image, video and audio in, text out; OpenAI's API",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag, "description": _TAGS[tag]} for tag in tags],
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, config: GatewayConfig) -> dict[str, Any]:
    answers = {str(status): _answer(answer, status) for status, answer in operation.responses.items()}
    if config.requests_per_minute and operation.method != "GET":
        for answer in answers.values():
            answer["headers"] |= {name: _header(name) for name in _RATE_HEADERS}
    for status in operation.error_statuses:
        if status != 401 or _asks_for_keys(config):
            own = operation.error_shape
            answers[str(status)] = (
                {"$ref": f"#/components/responses/Error{status}"} if own is None else _error(status, own)
            )
    written: dict[str, Any] = {
        "operationId": operation.handler.__name__,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": dict(sorted(answers.items())),
    }
    if operation.description:
        written["description"] = operation.description
    if parameters := _parameters(operation, config):
        written["parameters"] = parameters
    if operation.request is not None:
        content = _request(operation.request) | (_request(operation.form) if operation.form else {})
        if operation.examples:
            content["application/json"]["examples"] = {
                name: {"value": {"model": config.model_name, **example}} for name, example in operation.examples.items()
            }
        written["requestBody"] = {"required": True, "content": content}
    if _asks_for_keys(config) and not operation.is_open:
        written["security"] = [{"key": []}]
    return written


def _asks_for_keys(config: GatewayConfig) -> bool:
    return bool(config.api_keys) or config.api_keys_file is not None


def _parameters(operation: Operation, config: GatewayConfig) -> list[dict[str, Any]]:
    """Those named by the operation, and those of its path that it does not name."""
    named = {parameter.name: parameter for parameter in operation.parameters}
    written: list[dict[str, Any]] = [
        {
            "name": parameter.name,
            "in": parameter.where,
            "description": parameter.description,
            "required": parameter.required or parameter.where == "path",
            "schema": dict(parameter.schema),
        }
        for parameter in operation.parameters
    ]
    for match in _PATH_VARIABLE.finditer(operation.path):
        name = match.group(1)
        if name not in named:
            schema = {"type": "string", "minLength": 1}
            example = {"example": config.model_name} if name == "model" else {}
            written.append({"name": name, "in": "path", "required": True, "schema": schema, **example})
    return written


def _request(request: type[BaseModel] | FormBody) -> dict[str, Any]:
    if not isinstance(request, FormBody):
        return {"application/json": {"schema": _reference(request)}}
    # Fields of forms are texts: no shape refers to another one.
    form = request.shape.model_json_schema(ref_template=_REF, schema_generator=_Generator)
    file = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
    form["properties"] = {**dict.fromkeys(request.files, file), **form.get("properties", {})}
    if request.is_any:
        form["anyOf"] = [{"required": [name]} for name in request.files]
    else:
        form["required"] = [*request.files, *form.get("required", ())]
    return {"multipart/form-data": {"schema": form}}


def _answer(answer: Answer, status: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if answer.shape is not None:
        content["application/json"] = {"schema": _reference(answer.shape)}
    if answer.events is not None:
        content["text/event-stream"] = {"schema": _event(answer.events)}
    if answer.media_type is not None:
        content[answer.media_type] = {"schema": _OTHER_BODIES.get(answer.media_type, {"type": "string"})}
    written: dict[str, Any] = {"description": answer.description, "headers": _headers(status)}
    return {**written, "content": content} if content else written


def _event(shape: type[BaseModel]) -> dict[str, Any]:
    """One event. Before OpenAPI 3.2 a schema of a stream means each of its events."""
    chunk = {"anyOf": [_reference(shape), _reference(Error)]}
    return {
        "type": "object",
        "description": "One event: `data` is JSON, in the last event `[DONE]`. A stream that fails ends with an error "
        "object, and without `[DONE]`.",
        "required": ["data"],
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]"},
                    {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk},
                ]
            }
        },
    }


def _error(status: int, shape: type[BaseModel] = Error) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(shape)}}
    return {"description": ERRORS[status], "headers": _headers(status), "content": content}


def _headers(status: int) -> dict[str, Any]:
    names = ["X-Request-Id"]
    if status in (429, 503):
        names.append("Retry-After")
    if status == 401:
        names.append("WWW-Authenticate")
    if status == 405:
        names.append("Allow")
    return {name: _header(name) for name in names}


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


def _reference(shape: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=shape.__name__)}


def _schemas(operations: Iterable[Operation], config: GatewayConfig, num_token_ids: int) -> dict[str, Any]:
    """Every shape by its name. What a body may hold on this server is told where a schema can."""
    shapes: dict[type[BaseModel], None] = {Error: None}
    bodies: dict[type[BaseModel], None] = {}
    for operation in operations:
        if operation.request is not None and not isinstance(operation.request, FormBody):
            bodies[operation.request] = None
        if operation.error_shape is not None:
            shapes[operation.error_shape] = None
        for answer in operation.responses.values():
            shapes |= dict.fromkeys(shape for shape in (answer.shape, answer.events) if shape is not None)
    inputs = [(shape, "validation") for shape in (*shapes, *bodies)]
    _, written = models_json_schema(inputs, ref_template=_REF, schema_generator=_Generator)  # type: ignore[arg-type]
    schemas: dict[str, Any] = written["$defs"]
    for shape in bodies:
        _set_limits(schemas[shape.__name__]["properties"], config)
    for part in _parts_of(schemas):
        # A field of a shape may be called "format", too.
        if part.get("format") == TOKEN_ID:
            del part["format"], part["exclusiveMaximum"]
            part["maximum"] = num_token_ids - 1
    return dict(sorted(schemas.items()))


def _set_limits(properties: dict[str, Any], config: GatewayConfig) -> None:
    """Those of this server in a body's fields."""
    if "model" in properties:
        may_be_null = {"type": "null"} in properties["model"].get("anyOf", ())
        described = {name: words for name, words in properties["model"].items() if name == "description"}
        properties["model"] = {"enum": [config.model_name, *([None] if may_be_null else [])], **described}
    if "messages" in properties:
        for kind in _kinds(properties["messages"], "array"):
            kind["maxItems"] = config.max_messages
    for name in properties.keys() & {"n", "best_of"}:
        for kind in _kinds(properties[name], "integer"):
            kind.pop("exclusiveMaximum", None)
            kind["maximum"] = config.max_choices
    for kind in _kinds(properties.get("prompt", {}), "array"):
        # An array of numbers is one prompt.
        if kind["items"].get("type") != "integer":
            kind["maxItems"] = config.max_prompts


def _kinds(schema: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """A field's schema, or those of what it may be, that are of a type."""
    either = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [one for one in either if one.get("type") == kind]


def _parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside one, and what else is an object."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts_of(inner)


class _Generator(GenerateJsonSchema):
    """Without what says nothing: titles that repeat a field's name, and null as the default of what may be null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        written = super().default_schema(schema)
        if written.get("default", ...) is None:
            del written["default"]
        return written
