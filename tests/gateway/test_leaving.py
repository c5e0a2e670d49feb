"""A client that leaves, at every point of its request: nothing of it stays anywhere."""

import asyncio
from typing import Any

import pytest

from encoder.types import EncodeReply
from epd.types import Role
from tests.fakes.gateway import IMAGE_URL, MODEL, Stack, chat_body, running_gateway, says
from tests.fakes.stages import until

MODES = {"one worker": (Role.BOTH,), "prefill and decode": (Role.PREFILL, Role.DECODE)}
PICTURE = [{"type": "image_url", "image_url": {"url": IMAGE_URL}}, {"type": "text", "text": "?"}]
LONG = says("word " * 100)


class Point:
    """Where the request is held when its client leaves. `hold` prepares that, `reached` tells when it is there."""

    def __init__(self, name: str, *, stall_after: int | None = None, holds: str = "") -> None:
        self.name = name
        self._stall_after = stall_after
        self._holds = holds
        self.arrived = asyncio.Event()

    def hold(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        stack.workers[-1].stall_after = self._stall_after
        if self.name == "waiting for a worker":
            for worker in stack.workers:
                worker.die()
        owner: Any = {"fetch": stack.fetcher, "encode": stack.encoder}.get(self._holds)
        if owner is None:
            return
        real = getattr(owner, self._holds)

        async def held(*arguments: Any, **options: Any) -> Any:
            self.arrived.set()
            # Like the real ones, which give up what they hold when they are cancelled.
            await asyncio.sleep(3600)
            return await real(*arguments, **options)

        monkeypatch.setattr(owner, self._holds, held)

    async def reached(self, stack: Stack, num_choices: int) -> None:
        if self._holds:
            await self.arrived.wait()
        elif self.name == "waiting for a worker":
            await asyncio.sleep(0.05)
        else:
            wanted = num_choices if self._stall_after else 1
            await until(lambda: sum(worker.num_running for worker in stack.workers[-1:]) == wanted)


def points() -> list[Point]:
    return [
        Point("fetching", holds="fetch"),
        Point("encoding", holds="encode"),
        Point("waiting for a worker"),
        Point("computing the prompt", stall_after=0),
        Point("decoding", stall_after=3),
    ]


async def nothing_is_left(stack: Stack) -> None:
    await until(lambda: not any(worker.num_running or worker._expected for worker in stack.workers))
    await until(lambda: not stack.encoder.leases)
    for _ in range(200):
        if await stack.metric("mimo_gateway_inflight_requests") == 0:
            break
        await asyncio.sleep(0.005)
    assert await stack.metric("mimo_gateway_inflight_requests") == 0
    assert await stack.metric("mimo_gateway_disconnects_total") == 1
    assert len(stack.encoder.released) == len(set(stack.encoder.released))
    async with stack.session.get("/v1/pipeline") as response:
        [receipt] = (await response.json())["requests"]
    assert (receipt["status"], receipt["finish_reason"]) == (499, "cancelled")


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("number", "mode"),
    [
        pytest.param(number, mode, id=f"{point.name}, {mode}")
        for number, point in enumerate(points())
        for mode in MODES
        # The prefill worker that only pretends hands over at once.
        if (point.name, mode) != ("computing the prompt", "prefill and decode")
    ],
)
async def test_leaving_a_chat(
    number: int, mode: str, stream: bool, num_choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = points()[number]
    async with running_gateway(LONG, roles=MODES[mode], restart_wait_s=30.0) as stack:
        point.hold(stack, monkeypatch)
        body = chat_body(PICTURE, stream=stream, n=num_choices, max_tokens=200)
        request = asyncio.create_task(read_all(stack, "/v1/chat/completions", body))
        await point.reached(stack, num_choices)
        request.cancel()
        await nothing_is_left(stack)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_many_prompts(stream: bool) -> None:
    async with running_gateway(LONG, max_choices=2) as stack:
        stack.worker.stall_after = 3
        body = {"model": MODEL, "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 200, "stream": stream}
        request = asyncio.create_task(read_all(stack, "/v1/completions", body))
        await until(lambda: stack.worker.num_running == 2)
        request.cancel()
        await nothing_is_left(stack)
        assert len(stack.worker.submitted) == 2, "no more than two at a time"


async def read_all(stack: Stack, path: str, body: dict[str, Any]) -> bytes:
    async with stack.session.post(path, json=body) as response:
        return await response.read()


async def test_a_lease_that_comes_while_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two media one is there and leased while the other is still being encoded."""
    async with running_gateway(LONG) as stack:
        encode, waiting = stack.encoder.encode, asyncio.Event()

        async def second_waits(content: bytes, *rest: Any) -> EncodeReply:
            if content == b"video":
                waiting.set()
                await asyncio.sleep(3600)
            return await encode(content, *rest)

        monkeypatch.setattr(stack.encoder, "encode", second_waits)
        clip = {"type": "video_url", "video_url": {"url": "https://media.test/a.mp4"}}
        request = asyncio.create_task(read_all(stack, "/v1/chat/completions", chat_body([*PICTURE, clip])))
        await waiting.wait()
        await until(lambda: len(stack.encoder.leases) == 1)
        request.cancel()
        await nothing_is_left(stack)
