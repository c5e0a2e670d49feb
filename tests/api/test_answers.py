"""Answers of a real server, with all that can be asked for in them, are as its document says."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.asked import GREEDY, MEDIA, PICTURE, PICTURE_URL, TOOL
from tests.e2e.service import SAMPLES, Service
from tests.fakes.document import AnswerJudge

pytestmark = pytest.mark.e2e
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(served: Service) -> Ask:
    """Posts a body, or gets a path; holds what comes back to the document and returns it, streams as text."""
    judge = AnswerJudge(lambda: dict(served.get("/openapi.json").body))

    def ask(path: str, body: Any = None, *, method: str | None = None, **headers: str) -> Any:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(served.url + path, data=raw, headers=named, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
            judge.check(request.get_method(), path, response.status, response.headers, content)
            is_json = response.headers.get_content_type() == "application/json"
        return json.loads(content) if is_json else content

    return ask


EVERYTHING: dict[str, Any] = {
    **GREEDY,
    "max_tokens": 40,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "return_timings": True,
    "return_media": True,
}


@pytest.mark.parametrize("name", MEDIA)
def test_chat_with_everything(ask: Ask, name: str) -> None:
    whole = ask("/v1/chat/completions", {**EVERYTHING, "messages": MEDIA[name]})
    assert len(whole["choices"]) == 2
    assert whole["timings"]["steps"]
    (medium,) = whole["media"]
    assert medium["tokens"] > 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = ask("/v1/chat/completions", {**EVERYTHING, **options, "messages": MEDIA[name]})
    assert stream.endswith(b"data: [DONE]\n\n")
    assert b'"usage":{' in stream
    assert b'"timings":{' in stream


def test_calls_and_schemas(ask: Ask) -> None:
    for options in ({}, {"stream": True}):
        body = {**GREEDY, "max_tokens": 120, "messages": PICTURE, **options}
        ask("/v1/chat/completions", {**body, "tools": [TOOL], "tool_choice": "required"})
        ask("/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})


def test_completions_and_tokens(ask: Ask) -> None:
    body = {**GREEDY, "prompt": ["I see", "The clip"], "max_tokens": 6, "logprobs": 2, "n": 2, "return_timings": True}
    assert len(ask("/v1/completions", body)["choices"]) == 4
    ask("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    tokens = ask("/tokenize", {"model": GREEDY["model"], "prompt": "I see a red circle"})["tokens"]
    assert ask("/detokenize", {"model": GREEDY["model"], "tokens": tokens})["prompt"] == "I see a red circle"
    ask("/tokenize", {"model": GREEDY["model"], "messages": [{"role": "user", "content": "hello"}]})


def test_encoded_media(ask: Ask) -> None:
    parts = [MEDIA[name][0]["content"][0] for name in MEDIA]
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    encoded = ask("/v1/encode", {"input": [*parts, broken]})
    assert [item["object"] for item in encoded["data"]] == ["embedding"] * len(parts) + ["error"]
    assert ask("/v1/encode", {"input": parts[:1], "encoding_format": "float"})["data"][0]["embedding"]
    assert ask("/v1/encode", {"input": parts}, Accept="application/x-safetensors")


def test_files(ask: Ask) -> None:
    boundary = "----edge"
    content = (SAMPLES / "picture.png").read_bytes()
    form = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n'
        "Content-Type: image/png\r\n\r\n"
    ).encode()
    form += content + f"\r\n--{boundary}--\r\n".encode()
    file = ask("/v1/files", form, Content_Type=f"multipart/form-data; boundary={boundary}")
    path = f"/v1/files/{file['id']}"
    assert ask(path)["id"] == file["id"]
    assert ask("/v1/files")["data"]
    assert ask(f"{path}/content") == content
    assert ask(path, method="DELETE")["deleted"]


def test_what_the_server_says_of_itself(ask: Ask) -> None:
    for path in ("/", "/health", "/metrics", "/openapi.json", "/ready", "/v1/models", "/v1/models/mimo-nano"):
        assert ask(path)
    ask("/v1/chat/completions", {**GREEDY, "max_tokens": 2, "messages": PICTURE})
    pipeline = ask("/v1/pipeline")
    assert pipeline


def test_media_named_by_the_client(ask: Ask) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE_URL}, "uuid": "mine"}
    again = {"type": "image_url", "image_url": None, "uuid": "mine"}
    for content in (part, again):
        answer = ask("/v1/chat/completions", {**GREEDY, "max_tokens": 2, "messages": [message(content)]})
        assert answer["media"][0]["uuid"] == "mine"


def message(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part, {"type": "text", "text": "What is in the picture?"}]}
