"""Asks one chat completion and times it; waits out a server that is busy."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

# How long one request is tried again while the server says that it is busy, and how long one try may take.
RETRY_FOR_S = 300.0
REQUEST_TIMEOUT_S = 600.0
_RETRY_AFTER_S = 1.0
_MODELS_TIMEOUT_S = 30.0
_BUSY = (429, 503)


class NoAnswer(Exception):
    """A request that got no answer. `kind` is short and the same for the same fault: errors are counted by it."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Times are of the try that was answered; `ttft_s` is None where nothing was streamed."""

    text: str
    completion_tokens: int
    ttft_s: float | None
    total_s: float


class _Busy(Exception):
    """The server asks to come back."""

    def __init__(self, kind: str, message: str, after_s: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.after_s = after_s


class ChatClient:
    """Greedy chat completions of one model. `session` stays the caller's."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        *,
        stream: bool,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        self._session = session
        self._url = f"{base_url}/v1/chat/completions"
        self._stream = stream
        self._retry_for_s = retry_for_s
        self._fields: dict[str, Any] = {"model": model, "temperature": 0, "stream": stream}
        if stream:
            self._fields["stream_options"] = {"include_usage": True}

    async def ask(self, messages_json: bytes, max_tokens: int) -> Reply:
        """The answer to messages that are JSON already. A 429 or 503 is tried again as the server says.

        Raises NoAnswer.
        """
        fields = json.dumps(self._fields | {"max_tokens": max_tokens}).encode()
        body = fields[:-1] + b', "messages": ' + messages_json + b"}"
        give_up_s = time.monotonic() + self._retry_for_s
        while True:
            try:
                return await self._try(body)
            except _Busy as busy:
                if time.monotonic() + busy.after_s > give_up_s:
                    raise NoAnswer(busy.kind, str(busy)) from busy
                await asyncio.sleep(busy.after_s)
            except TimeoutError as error:
                raise NoAnswer("timeout", f"no answer within {REQUEST_TIMEOUT_S:g} s") from error
            except aiohttp.ClientError as error:
                raise NoAnswer("connection", _words(error)) from error

    async def _try(self, body: bytes) -> Reply:
        started_s = time.monotonic()
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with self._session.post(self._url, data=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise _refusal(response, await response.text())
            if self._stream:
                return await _read_stream(response, started_s)
            return _read_whole(await response.read(), started_s)


def _refusal(response: aiohttp.ClientResponse, text: str) -> Exception:
    try:
        error = json.loads(text)["error"]
        code, message = str(error.get("code") or error.get("type") or ""), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message = "", f"status {response.status}, and no OpenAI error: is this an OpenAI-compatible server?"
    kind = f"{response.status} {code}".strip()
    if response.status not in _BUSY:
        return NoAnswer(kind, message)
    return _Busy(kind, message, _retry_after_s(response.headers.get("Retry-After", "")))


def _retry_after_s(header: str) -> float:
    try:
        return min(max(float(header), 0.05), 60.0)
    except ValueError:
        # Absent, or a date.
        return _RETRY_AFTER_S


def _read_whole(raw: bytes, started_s: float) -> Reply:
    total_s = time.monotonic() - started_s
    try:
        body = json.loads(raw)
        text, num_tokens = body["choices"][0]["message"]["content"] or "", int(body["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise NoAnswer("not a chat completion", f"{error!r} in {raw[:200]!r}") from error
    return Reply(text, num_tokens, None, total_s)


async def _read_stream(response: aiohttp.ClientResponse, started_s: float) -> Reply:
    """Raises NoAnswer for a stream that ends in an error, or without its mark."""
    pieces: list[str] = []
    num_tokens, ttft_s = 0, None
    try:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return Reply("".join(pieces), num_tokens, ttft_s, time.monotonic() - started_s)
            piece, used = _read_event(data)
            if piece and ttft_s is None:
                ttft_s = time.monotonic() - started_s
            pieces.append(piece)
            num_tokens = used or num_tokens
    except LineTooLong as error:
        raise NoAnswer("not a chat completion", "a line of the stream is too long") from error
    raise NoAnswer("stream cut short", "the stream ended without [DONE]")


def _read_event(data: bytes) -> tuple[str, int]:
    """Text of one event, and the answer's tokens once they are told, else 0. Raises NoAnswer."""
    try:
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            raise NoAnswer(f"stream {error.get('code') or error.get('type') or 'error'}", str(error.get("message")))
        piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or [])
        return piece, int((event.get("usage") or {}).get("completion_tokens", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoAnswer("not a chat completion", f"{error!r} in {data[:200]!r}") from error


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first model the server lists. Raises NoAnswer when nothing there answers like an OpenAI server."""
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)) as response:
            if response.status != 200:
                raise _refusal(response, await response.text())
            return str(json.loads(await response.read())["data"][0]["id"])
    except TimeoutError as error:
        raise NoAnswer("timeout", f"{url} did not answer within {_MODELS_TIMEOUT_S:g} s") from error
    except (NoAnswer, _Busy) as error:
        raise NoAnswer(error.kind, f"{url} answered with status {response.status}: {error}") from error
    except aiohttp.ClientError as error:
        raise NoAnswer("connection", f"{url}: {_words(error)}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise NoAnswer("no models", f"{url} lists no model: is this an OpenAI-compatible server?") from error


def _words(error: aiohttp.ClientError) -> str:
    match error:
        case aiohttp.TooManyRedirects():
            return "it redirects without end"
        case aiohttp.InvalidURL():
            return "this is no URL that can be asked"
        case _:
            return str(error) or type(error).__name__
