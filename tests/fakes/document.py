"""Holds every answer of a gateway to the document it serves about itself."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from epd.gateway.app import OPERATIONS
from epd.gateway.openapi import document
from epd.gateway_config import GatewayConfig

_ROOT = "urn:document"


class AnswerJudge:
    """Of one server. Raises AssertionError for an answer that its document does not foresee."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        """`read` gives the document; it is called once, when the first answer is there."""
        self._read = read
        self._document: dict[str, Any] | None = None

    @classmethod
    def of(cls, app: web.Application, config: GatewayConfig) -> "AnswerJudge":
        """Of an application in this process."""
        return cls(lambda: document(app[OPERATIONS], config))

    @property
    def document(self) -> dict[str, Any]:
        if self._document is None:
            self._document = _made(json.dumps(self._read()))
        return self._document

    def check(self, method: str, url: str, status: int, headers: Mapping[str, str], body: bytes | str) -> None:
        """One whole answer, as the client got it."""
        path = urlsplit(url).path
        operation = self._operation(method, path)
        assert "X-Request-Id" in headers, f"{method} {path}: no request id"
        where = f"{method} {path}, status {status}"
        if operation is None:
            assert status in (401, 404, 405), f"{where}: no such operation in the document"
            _validate(self.document, {"$ref": "#/components/schemas/Error"}, json.loads(body), where)
            return
        answers = operation["responses"]
        assert str(status) in answers, f"{where}: the document has only {', '.join(answers)}"
        answer = _resolved(self.document, answers[str(status)])
        for name, header in answer.get("headers", {}).items():
            rule = _resolved(self.document, header)
            assert name in headers, f"{where}: no header {name}"
            _validate(self.document, rule["schema"], headers[name], f"{where}, header {name}")
        self._check_body(answer.get("content", {}), headers.get("Content-Type", ""), body, where)

    def _check_body(self, content: Mapping[str, Any], content_type: str, body: bytes | str, where: str) -> None:
        media_type = content_type.partition(";")[0].strip()
        if not content or "*/*" in content:
            return
        assert media_type in content, f"{where}: sent {media_type}, the document has only {', '.join(content)}"
        if media_type == "application/json":
            _validate(self.document, content[media_type]["schema"], json.loads(body), where)
        elif media_type == "text/event-stream":
            text = body if isinstance(body, str) else body.decode()
            for block in text.split("\n\n"):
                data = block.removeprefix("data: ")
                if data and data != "[DONE]":
                    _, piece = content[media_type]["schema"]["properties"]["data"]["anyOf"]
                    _validate(self.document, piece["contentSchema"], json.loads(data), where)

    def _operation(self, method: str, path: str) -> dict[str, Any] | None:
        for pattern, operations in self.document["paths"].items():
            parts, given = pattern.split("/"), path.split("/")
            same = len(parts) == len(given) and all(
                a == b or a.startswith("{") for a, b in zip(parts, given, strict=True)
            )
            if same and method.lower() in operations:
                return dict(operations[method.lower()])
        return None


@cache
def _made(text: str) -> dict[str, Any]:
    """One object for equal documents, so that validators are made once."""
    return dict(json.loads(text))


_VALIDATORS: dict[tuple[int, str], Draft202012Validator] = {}


def _validate(whole: dict[str, Any], schema: Mapping[str, Any], value: object, where: str) -> None:
    key = (id(whole), json.dumps(schema))
    if key not in _VALIDATORS:
        registry: Registry[Any] = Registry().with_resource(_ROOT, DRAFT202012.create_resource(whole))
        _VALIDATORS[key] = Draft202012Validator(_absolute(schema), registry=registry)
    fault = next(iter(_VALIDATORS[key].iter_errors(value)), None)
    assert fault is None, (
        f"{where}: {fault.json_path} is not as the document says: {fault.message}. Its shape is in "
        "epd/gateway/answer_shapes.py, or beside the part that answers"
    )


def _absolute(schema: Any) -> Any:
    match schema:
        case {"$ref": str(reference)}:
            return {"$ref": _ROOT + reference}
        case dict():
            return {name: _absolute(value) for name, value in schema.items()}
        case list():
            return [_absolute(value) for value in schema]
        case _:
            return schema


def _resolved(whole: dict[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" not in value:
        return dict(value)
    found: Any = whole
    for name in value["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return dict(found)
