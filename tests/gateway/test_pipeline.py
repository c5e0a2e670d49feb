"""`GET /v1/pipeline`: its shape, what it tells of each process, whose requests it shows, and what it costs."""

import asyncio
import json
import time
from typing import Any

import pytest

from epd.gateway.pipeline import PipelineView
from epd.gateway.receipt import CacheTokens, Receipt, Step
from epd.gateway.recent import RecentRequests
from epd.types import Role
from tests.fakes.gateway import IMAGE_URL, Stack, running_gateway, says

EPD = (Role.PREFILL, Role.DECODE)


async def pipeline(stack: Stack, query: str = "", key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with stack.session.get(f"/v1/pipeline{query}", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Cache-Control"] == "no-store"
        body: dict[str, Any] = await response.json()
    PipelineView.model_validate(body, strict=True, extra="forbid")
    return body


def receipt(number: int, *, num_steps: int = 2) -> Receipt:
    steps = tuple(
        Step(stage="gateway", name="render", start_s=0.001 * step, duration_s=0.001) for step in range(num_steps)
    )
    return Receipt(
        request_id=f"r{number}",
        model="tiny",
        arrival_unix_s=float(number),
        route="/v1/chat/completions",
        status=200,
        finish_reason="stop",
        duration_s=0.5,
        steps=steps,
        cache_tokens=CacheTokens(l1=3),
    )


async def test_every_process_of_every_stage_is_told() -> None:
    async with running_gateway(roles=EPD) as stack:
        await stack.ask([{"type": "image_url", "image_url": {"url": IMAGE_URL}}])
        view = await pipeline(stack)
        stack.workers[1].ready = False
        for _ in range(500):
            if (after := await pipeline(stack))["status"] != "ready":
                break
            await asyncio.sleep(0.01)
    assert view["status"] == "ready"
    assert [stage["stage"] for stage in view["stages"]] == ["gateway", "encode", "prefill", "decode"]
    encode, prefill = view["stages"][1]["processes"], view["stages"][2]["processes"]
    # Two replicas share an arena: it is told once.
    assert [len(process["pools"]) for process in encode] == [1, 0]
    assert encode[0]["pools"][0] == {
        "pool": "embeddings",
        "unit": "bytes",
        "total": 1024,
        "free": 960,
        "cached": 32,
        "leased": 32,
    }
    assert set(encode[0]["modalities"]) == {"image", "video", "audio"}
    [worker] = prefill
    assert worker["pools"] == [
        {"pool": "full", "unit": "pages", "total": 20, "free": 10, "cached": 0, "leased": 10},
        {"pool": "window", "unit": "pages", "total": 8, "free": 5, "cached": 0, "leased": 3},
    ]
    assert after["status"] == "waiting"
    assert after["stages"][3]["processes"][0]["reason"]
    assert not after["stages"][3]["processes"][0]["ready"]


async def test_every_request_has_its_receipt_and_old_ones_are_not_sent_again() -> None:
    async with running_gateway(says("a red circle")) as stack:
        await stack.ask("What is this?")
        await stack.events("And this?")
        status, _, _ = await stack.ask("What?", max_tokens=-1)
        assert status == 400
        view = await pipeline(stack)
        assert [request["sequence"] for request in view["requests"]] == [1, 2, 3]
        assert [request["status"] for request in view["requests"]] == [200, 200, 400]
        assert view["requests"][0]["steps"]
        assert view["sequence"] == 3
        assert (await pipeline(stack, "?after=2"))["requests"] == view["requests"][2:]
        assert (await pipeline(stack, "?after=3"))["requests"] == []
        # Nothing of what was said is kept.
        assert "What is this?" not in json.dumps(view)
        assert "red circle" not in json.dumps(view)


async def test_a_client_sees_the_requests_of_its_own_key_alone() -> None:
    async with running_gateway(api_keys=("one", "two")) as stack:
        for key in ("one", "two", "two"):
            status, _, _ = await stack.post(
                {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
                headers={"Authorization": f"Bearer {key}"},
            )
            assert status == 200
        assert len((await pipeline(stack, key="one"))["requests"]) == 1
        both = await pipeline(stack, key="two")
        assert [request["sequence"] for request in both["requests"]] == [2, 3]
        assert both["sequence"] == 3
        async with stack.session.get("/v1/pipeline") as response:
            assert response.status == 401


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 40, "٣"])
async def test_an_after_that_is_no_number_is_refused(after: str) -> None:
    async with running_gateway() as stack, stack.session.get("/v1/pipeline", params={"after": after}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "after"


def test_the_ring_is_bounded_and_keeps_the_last() -> None:
    ring = RecentRequests(capacity=3)
    for number in range(1, 6):
        ring.add(receipt(number), owner="" if number != 4 else "somebody")
    assert ring.num_added == 5
    assert [entry.receipt.request_id for entry in ring.of_owner("")] == ["r3", "r5"]
    assert [entry.sequence for entry in ring.of_owner("", after=3)] == [5]
    assert [entry.sequence for entry in ring.of_owner("somebody")] == [4]
    with pytest.raises(ValueError, match="must be positive"):
        RecentRequests(capacity=0)


def test_a_full_ring_is_told_in_little_time() -> None:
    """It is told on the loop that answers requests: 64 receipts of 20 steps take far less than a token does."""
    ring = RecentRequests()
    for number in range(100):
        ring.add(receipt(number, num_steps=20))
    spent_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        json.dumps([entry.to_json() for entry in ring.of_owner("")])
        spent_s.append(time.perf_counter() - started_s)
    assert min(spent_s) < 0.02
