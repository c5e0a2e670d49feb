"""Chat completions of any OpenAI-compatible server, streamed over the standard library's HTTP client.

The terminal's main thread reads the stream, so Ctrl-C breaks off an answer where it is and nothing else; closing the
connection tells the server. Nothing here loads a server's libraries.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from cli.errors import ConfigError
from cli.terminal import os_words

_CONNECT_TIMEOUT_S: Final = 20.0
_MAX_LINE_BYTES: Final = 64 << 20


class ChatFailed(Exception):
    """The server refused, broke off or is not there; the message is one line for a person."""


class MessageRefused(ChatFailed):
    """The server does not take this message, and would not a second time."""


class ModelUnknown(MessageRefused):
    """The server has no model of that name."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask. `base_url` ends before `/v1`."""

    base_url: str
    model: str
    api_key: str = ""


@dataclass(slots=True)
class Reply:
    """An answer as far as it has come. Times are seconds since the request was sent; `ttft_s` is that of the first
    piece, None before it."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    warnings: list[Any] = field(default_factory=list)
    ttft_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of the answer after its first token; None where there is no second, or both came in the same moment."""
        num_tokens = self.usage.get("completion_tokens", 0)
        if self.ttft_s is None or num_tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return float(num_tokens - 1) / (self.total_s - self.ttft_s)


Show = Callable[[Literal["text", "reasoning"], str], None]


def server_root(url: str) -> str:
    """`http://host:port/v1/` and `http://host:port` name the same server. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url is {url!r}: {error}; give an address like http://127.0.0.1:8000") from error
    path = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigError(f"--url is {url!r}; give an address like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{path}"


def first_model(base_url: str, api_key: str) -> str:
    """The first model that the server lists. Raises ChatFailed."""
    target = Target(base_url, "", api_key)
    with closing(_connect(target)) as connection:
        body = _answered(target, connection, "GET", "/v1/models", None).read()
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ChatFailed(f"{base_url} lists no model: is this an OpenAI-compatible server?") from error


def ask(target: Target, body: Mapping[str, Any], reply: Reply, show: Show) -> None:
    """Stream one answer into `reply`, and each piece to `show`. What has come stays in `reply` when this is broken off.

    Raises ChatFailed.
    """
    started_s = time.monotonic()
    whole = {"model": target.model, **body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with closing(_connect(target)) as connection:
            response = _answered(target, connection, "POST", "/v1/chat/completions", json.dumps(whole))
            if not (response.getheader("Content-Type") or "").startswith("text/event-stream"):
                raise ChatFailed(f"{target.base_url} sends no stream: this is no OpenAI-compatible server")
            for event in _events(target, response):
                reply.total_s = time.monotonic() - started_s
                _take(event, reply, show)
    finally:
        reply.total_s = time.monotonic() - started_s
    if reply.finish_reason is None:
        raise ChatFailed(f"{target.base_url} ended the answer before it was finished")


def _take(event: Any, reply: Reply, show: Show) -> None:
    if "error" in event:
        error = event["error"]
        raise _failure(error.get("status") or error.get("code"))(str(error["message"]))
    reply.usage = event.get("usage") or reply.usage
    reply.warnings = event.get("warnings") or reply.warnings
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        # vLLM says `reasoning` since 0.12, everybody else `reasoning_content`.
        reasoning, text = delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or ""
        if (reasoning or text) and reply.ttft_s is None:
            reply.ttft_s = reply.total_s
        reply.reasoning += reasoning
        reply.text += text
        if reasoning:
            show("reasoning", reasoning)
        if text:
            show("text", text)


def _connect(target: Target) -> http.client.HTTPConnection:
    parts = urlsplit(target.base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_CONNECT_TIMEOUT_S)
    try:
        connection.connect()
    except OSError as error:
        raise ChatFailed(f"cannot connect to {target.base_url}: {os_words(error)}") from error
    # An answer takes as long as it takes; whoever has enough of it presses Ctrl-C.
    connection.sock.settimeout(None)
    return connection


def _answered(
    target: Target, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
) -> http.client.HTTPResponse:
    """The response to a request, if it is a success. Raises ChatFailed."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        connection.request(method, urlsplit(target.base_url).path + path, body, headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        said = response.read(1 << 20)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ChatFailed(f"{target.base_url} broke off: {error or type(error).__name__}") from error
    message = _message(response.status, target.base_url, said)
    # A server that knows this path and speaks OpenAI's errors can only lack the model.
    if response.status == 404 and method == "POST" and b'"error"' in said:
        raise ModelUnknown(message)
    raise _failure(response.status)(message)


def _failure(status: Any) -> type[ChatFailed]:
    """A key, a rate or a pause is no fault of the message."""
    is_lasting = isinstance(status, int) and 400 <= status < 500 and status not in (401, 403, 408, 429)
    return MessageRefused if is_lasting else ChatFailed


def _message(status: int, base_url: str, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{base_url} answered with status {status} and no OpenAI error: is this an OpenAI-compatible server?"


def _events(target: Target, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of an event stream. Raises ChatFailed."""
    while True:
        try:
            line = response.readline(_MAX_LINE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailed(f"{target.base_url} broke off: {error or type(error).__name__}") from error
        if not line:
            return
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatFailed(f"{target.base_url} sent no JSON: {data[:80]!r}") from error
        if isinstance(event, dict):
            yield event
