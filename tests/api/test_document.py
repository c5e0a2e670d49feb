"""What the document says of every operation, asked of a real server: types of bodies, methods, unknown things."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.e2e.service import Answer, Service

pytestmark = pytest.mark.e2e
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def ask(served: Service, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.url + path, data=body, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raw, status, received = response.read(), response.status, dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            raw, status, received = error.read(), error.code, dict(error.headers)
    return Answer(status, json.loads(raw), received, 0.0)


@pytest.fixture(scope="module")
def operations(served: Service) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path with sample values, and what the document says."""
    paths = served.get("/openapi.json").body["paths"]
    return [
        (method.upper(), path.replace("{", "").replace("}", ""), operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]


def assert_error(answer: Answer, status: int, code: str) -> None:
    assert answer.status == status, answer
    assert answer.body["error"]["code"] == code
    assert answer.body["error"]["message"]
    assert answer.headers["X-Request-Id"]


def test_bodies_of_other_types_are_415(served: Service, operations: list[tuple[str, str, dict[str, Any]]]) -> None:
    asked = 0
    for method, path, operation in operations:
        if "requestBody" not in operation:
            continue
        asked += 1
        for content_type in ("text/plain", "application/xml", "application/x-www-form-urlencoded"):
            answer = ask(served, method, path, b"{}", Content_Type=content_type)
            assert_error(answer, 415, "unsupported_media_type")
        answer = ask(served, method, path, b"{}", Content_Type="application/json", Content_Encoding="gzip")
        assert_error(answer, 415, "unsupported_media_type")
    assert asked >= 1


def test_other_methods_are_405_and_told_which_are_right(
    served: Service, operations: list[tuple[str, str, dict[str, Any]]]
) -> None:
    allowed: dict[str, set[str]] = {}
    for method, path, _ in operations:
        allowed.setdefault(path, set()).update({method, "HEAD"} if method == "GET" else {method})
    for path, methods in allowed.items():
        for method in set(METHODS) - methods:
            answer = ask(served, method, path)
            assert_error(answer, 405, "method_not_allowed")
            assert set(answer.headers["Allow"].split(",")) == methods


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat", "/v2/models", "/v1/models/", "/..", "/%00", "/%ff"])
def test_unknown_paths_are_404(served: Service, path: str) -> None:
    assert_error(ask(served, "GET", path), 404, "unknown_route")


def test_request_ids_come_back(served: Service) -> None:
    assert ask(served, "GET", "/v1/models", X_Request_Id="mine-1").headers["X-Request-Id"] == "mine-1"
    assert ask(served, "GET", "/v1/models/none", X_Request_Id="mine-2").headers["X-Request-Id"] == "mine-2"
    for nonsense in ("", "two words", "x" * 129, "a/b"):
        received = ask(served, "GET", "/v1/models", X_Request_Id=nonsense).headers["X-Request-Id"]
        assert received.startswith("req-")
