"""Clients of the soak: each request is followed to its one end, or left in the middle."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.soak.mix import Ask

# Longer than the server gives any request.
HUNG_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended: right, wrong, refused (4xx), busy (503 and the like, or such an event in a stream), left (by
    the client), cut (the connection broke), fault (what no client may ever see), hung."""

    kind: str
    outcome: str
    seconds: float
    detail: str = ""
    request_id: str = ""
    """As the server's log has it."""


async def follow(session: aiohttp.ClientSession, ask: Ask, leave_after_s: float | None) -> End:
    """Ask and wait for the end; `leave_after_s`: hang up then if it has not come."""
    loop, request_id = asyncio.get_running_loop(), f"soak-{uuid.uuid4().hex}"
    started_s = loop.time()
    try:
        async with asyncio.timeout(HUNG_AFTER_S if leave_after_s is None else leave_after_s):
            outcome, detail = await _asked(session, ask, request_id)
    except TimeoutError:
        outcome, detail = ("hung", "") if leave_after_s is None else ("left", "")
    except (aiohttp.ClientError, ConnectionError) as error:
        outcome, detail = "cut", type(error).__name__
    return End(ask.kind, outcome, loop.time() - started_s, detail, request_id)


async def _asked(session: aiohttp.ClientSession, ask: Ask, request_id: str) -> tuple[str, str]:
    async with session.post(ask.path, json=ask.body, headers={"X-Request-Id": request_id}) as response:
        if response.status != 200:
            body = await response.json()
            words = f"{response.status} {body['error']['code']}"
            if response.status >= 500 or response.status == 429:
                return ("busy" if response.status in (429, 503) else "fault"), words
            return ("refused" if ask.kind == "refused" else "fault"), words
        if ask.kind == "refused":
            return "fault", "a file outside the media roots was read"
        return await _stream(response, ask) if ask.streams else _whole(await response.json(), ask)


def _whole(body: dict[str, Any], ask: Ask) -> tuple[str, str]:
    choices = body["choices"]
    if len(choices) != ask.num_choices or any(choice["finish_reason"] is None for choice in choices):
        return "fault", f"{len(choices)} choices"
    return _judged([choice["message"]["content"] for choice in choices], body["usage"], ask)


async def _stream(response: aiohttp.ClientResponse, ask: Ask) -> tuple[str, str]:
    """Every choice ends once, nothing follows its end, usage and [DONE] come last and once."""
    texts = [""] * ask.num_choices
    ends, usage, done = [0] * ask.num_choices, None, False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if done:
            return "fault", "an event after [DONE]"
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            code = event["error"]["code"]
            return ("busy" if event["error"].get("type") in _TRY_AGAIN else "fault"), f"event {code}"
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            if ends[index]:
                return "fault", "text after the end of a choice"
            texts[index] += choice["delta"].get("content") or ""
            ends[index] += choice["finish_reason"] is not None
    if not done or usage is None or ends != [1] * ask.num_choices:
        return "fault", f"a stream ended with {ends} ends, {'no ' * (usage is None)}usage, done: {done}"
    return _judged(texts, usage, ask)


# OpenAI's types of errors that are worth another try.
_TRY_AGAIN = ("server_error", "service_unavailable", "overloaded_error", "service_unavailable_error")


def _judged(texts: list[str], usage: dict[str, Any], ask: Ask) -> tuple[str, str]:
    if usage["completion_tokens"] <= 0 or usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return "fault", f"usage {usage}"
    if ask.right is not None and any(text != ask.right for text in texts):
        return "wrong", repr(texts)
    return "right", ""


def patience(rng: random.Random, share: float) -> float | None:
    """After how many seconds this client hangs up; None for one that waits for the end."""
    return rng.uniform(0.0, 1.5) if rng.random() < share else None
