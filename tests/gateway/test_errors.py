"""Bad requests: the right status, an OpenAI error object, the field by name, and a request id on every answer."""

from typing import Any

import pytest

from tests.fakes.gateway import IMAGE_URL, chat_body, running_gateway
from tests.fakes.stages import CONTEXT_TOKENS


def with_part(part: Any) -> dict[str, Any]:
    return chat_body([{"type": "text", "text": "hi"}, part])


FAULTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": (chat_body() | {"model": "gpt"}, 404, "model"),
    "unknown field": (chat_body(foo=1), 400, "foo"),
    "n": (chat_body(n=0), 400, "n"),
    "response format": (chat_body(response_format={"type": "xml"}), 400, "response_format.type"),
    "tool choice": (chat_body(tool_choice="required"), 400, "tool_choice"),
    "temperature": (chat_body(temperature=9), 400, "temperature"),
    "temperature kind": (chat_body(temperature="hot"), 400, "temperature"),
    "max tokens": (chat_body(max_tokens=0), 400, "max_tokens"),
    "max tokens beyond context": (chat_body(max_tokens=CONTEXT_TOKENS), 400, "max_tokens"),
    "no messages": (chat_body() | {"messages": []}, 400, "messages"),
    "role": (chat_body() | {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    "empty parts": (chat_body([]), 400, "messages[0].content"),
    "part type": (with_part({"type": "smell"}), 400, "messages[0].content[1].type"),
    "part field": (
        with_part({"type": "image_url", "image_url": {"url": IMAGE_URL, "x": 1}}),
        400,
        "messages[0].content[1].image_url.x",
    ),
    "part option": (
        with_part({"type": "video_url", "video_url": {"url": IMAGE_URL, "fps": 0}}),
        400,
        "messages[0].content[1].video_url.fps",
    ),
    "option over ceiling": (
        with_part({"type": "image_url", "image_url": {"url": IMAGE_URL, "max_pixels": 10**9}}),
        400,
        "messages[0].content[1].image_url.max_pixels",
    ),
    "unreachable": (
        with_part({"type": "image_url", "image_url": {"url": "https://media.test/none"}}),
        400,
        "messages[0].content[1].image_url",
    ),
    "prompt too long": (chat_body("word " * 6000), 400, "messages"),
    "template option": (chat_body(chat_template_kwargs={"magic": True}), 400, "chat_template_kwargs.magic"),
    "call arguments": (
        chat_body()
        | {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}],
                }
            ]
        },
        400,
        "messages[0].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_named(fault: str) -> None:
    body, status, param = FAULTS[fault]
    async with running_gateway() as stack:
        found, answer, headers = await stack.post(body)
        assert (found, answer["error"]["param"]) == (status, param), answer
        assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert answer["error"]["code"]
        assert answer["error"]["message"]
        assert headers["X-Request-Id"]
        assert not stack.worker.submitted
        assert not stack.encoder.leases


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b"3"])
async def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    async with running_gateway() as stack:
        status, answer, _ = await stack.post(raw)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"


async def test_routes_methods_and_sizes() -> None:
    async with running_gateway(max_body_bytes=1000) as stack:
        async with stack.session.get("/v2/none") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_route")
            assert response.headers["X-Request-Id"]
        async with stack.session.get("/v1/chat/completions") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
            assert response.headers["Allow"] == "POST"
        async with stack.session.get("/v1/models/other") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        status, answer, _ = await stack.ask("x" * 2000)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_api_keys() -> None:
    async with running_gateway(api_keys=("secret", "other")) as stack:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer, _ = await stack.post(chat_body(), headers=headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        for key in ("secret", "other"):
            assert (await stack.post(chat_body(), headers={"Authorization": f"Bearer {key}"}))[0] == 200
        async with stack.session.get("/health") as response:
            assert response.status == 200


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("a" * 200, False), ("a b", False), ("x;y", False)])
async def test_request_ids(given: str, kept: bool) -> None:
    async with running_gateway() as stack:
        _, _, headers = await stack.post(chat_body(), headers={"X-Request-Id": given})
        assert (headers["X-Request-Id"] == given) is kept


async def test_an_unforeseen_error_ends_the_request() -> None:
    async with running_gateway() as stack:
        stack.fetcher.contents = None  # type: ignore[assignment]
        part = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
        status, answer, headers = await stack.post(with_part(part))
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert headers["X-Request-Id"] in answer["error"]["message"]
        assert (await stack.ask())[0] == 200
