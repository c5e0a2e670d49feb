"""Receipts: where the time of requests went, whatever became of them."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.types import StageTimings
from epd.gateway.account import Account, AttemptTimes
from epd.gateway.receipt import Receipt, Step
from epd.types import Role
from tests.fakes.gateway import IMAGE_URL, MODEL, Stack, chat_body, running_gateway, says
from tests.fakes.stages import until

MODES = {"one worker": (Role.BOTH,), "prefill and decode": (Role.PREFILL, Role.DECODE)}
TEXT = "one two three four five six"
PICTURE = [{"type": "image_url", "image_url": {"url": IMAGE_URL}}, {"type": "text", "text": "?"}]
NOWHERE = [{"type": "image_url", "image_url": {"url": "https://media.test/none"}}]
# The order in which a request passes them, as far as it does.
ORDER = [
    ("gateway", "read"),
    ("gateway", "parse"),
    ("gateway", "render"),
    ("gateway", "fetch"),
    ("encode", "queue"),
    ("encode", "prepare"),
    ("encode", "batch_wait"),
    ("encode", "tower"),
    ("gateway", "assemble"),
    ("gateway", "dispatch"),
    ("transfer", "inputs"),
    ("prefill", "queue"),
    ("prefill", "compute"),
    ("transfer", "kv"),
    ("decode", "queue"),
    ("decode", "decode"),
]


def covered_s(steps: list[dict[str, Any]]) -> float:
    """Time in which some step was under way."""
    total = stop = 0.0
    for step in sorted(steps, key=lambda step: step["start_s"]):
        end = step["start_s"] + step["duration_s"]
        total += max(0.0, end - max(stop, step["start_s"]))
        stop = max(stop, end)
    return total


def check(timings: dict[str, Any]) -> None:
    """Steps lie within the request, follow each other as they must, and leave little unexplained."""
    steps = timings["steps"]
    for step in steps:
        assert step["start_s"] >= 0
        assert step["duration_s"] > 0
        assert step["start_s"] + step["duration_s"] <= timings["duration_s"] + 1e-6
    names = [(step["stage"], step["name"]) for step in steps]
    places = [ORDER.index(name) for name in names]
    assert places == sorted(places), names
    for earlier, later in pairwise(steps):
        assert later["start_s"] >= earlier["start_s"] + earlier["duration_s"] - 2e-6, (earlier, later)
    assert covered_s(steps) >= timings["duration_s"] - 0.03


def by_name(timings: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(step["stage"], step["name"]): step["duration_s"] for step in timings["steps"]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_steps_of_a_request_are_its_time(mode: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway(says(TEXT), roles=MODES[mode]) as stack:
        for worker in stack.workers:
            worker.step_s = 0.03
        slow_encoder(stack, monkeypatch, StageTimings(queue_s=0.01, prepare_s=0.02, batch_wait_s=0.01, tower_s=0.02))
        if stream:
            events = await stack.events(PICTURE, return_timings=True)
            *others, last = [event for event in events if event != "[DONE]"]
            assert not any("timings" in event for event in others)
            assert last["choices"][0]["finish_reason"] == "stop"
            timings, request_id = last["timings"], last["id"]
        else:
            _, body, _ = await stack.ask(PICTURE, return_timings=True)
            timings, request_id = body["timings"], body["id"]
        check(timings)
        found = by_name(timings)
        assert found["encode", "tower"] == pytest.approx(0.02, abs=1e-3)
        assert found["encode", "prepare"] == pytest.approx(0.02, abs=1e-3)
        assert found["prefill", "compute"] == pytest.approx(0.03, abs=1e-3)
        assert found["prefill", "queue"] == pytest.approx(0.03, abs=1e-3)
        assert (("transfer", "kv") in found) == (mode != "one worker")
        assert [step["item"] for step in timings["steps"] if step["stage"] == "encode"] == [
            "messages[0].content[0].image_url"
        ] * 4
        assert timings["request_id"] == request_id
        assert timings["status"] == 200
        assert timings["cache_tokens"] == {"l1": 1, "l2": 1, "l3": 1, "healed": 2}
        assert timings["media_tokens"] == {"image": 9}
        assert (timings["num_media"], timings["cached_media"], timings["num_attempts"]) == (1, 0, 1)
        assert 0.06 <= timings["first_token_s"] <= timings["duration_s"]
        [told] = await receipts(stack)
        assert told["steps"] == timings["steps"]


def slow_encoder(stack: Stack, monkeypatch: pytest.MonkeyPatch, timings: StageTimings) -> None:
    encode = stack.encoder.encode

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(timings.queue_s + timings.prepare_s + timings.batch_wait_s + timings.tower_s)
        reply = await encode(*arguments)
        return type(reply)(**{name: getattr(reply, name) for name in reply.__struct_fields__} | {"timings": timings})

    monkeypatch.setattr(stack.encoder, "encode", slow)


async def receipts(stack: Stack) -> list[dict[str, Any]]:
    async with stack.session.get("/v1/pipeline") as response:
        found: list[dict[str, Any]] = (await response.json())["requests"]
        return found


async def test_nothing_is_said_unless_asked_for() -> None:
    async with running_gateway() as stack:
        assert "timings" not in (await stack.ask())[1]
        assert not any("timings" in event for event in await stack.events() if event != "[DONE]")
        assert len(await receipts(stack)) == 2


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (json.dumps(chat_body(temperature=9)).encode(), 400, "invalid_request"),
        (json.dumps({**chat_body(), "model": "other"}).encode(), 404, "model_not_found"),
        (
            json.dumps(chat_body([{"type": "image_url", "image_url": {"url": "https://media.test/none"}}])).encode(),
            400,
            "",
        ),
    ],
)
async def test_what_is_refused_has_a_receipt(body: bytes, status: int, code: str) -> None:
    async with running_gateway() as stack:
        found, answer, _ = await stack.post(body)
        assert found == status
        [receipt] = await receipts(stack)
        assert (receipt["status"], receipt["error"]) == (status, answer["error"]["code"])
        assert receipt["error"] == code or not code
        assert receipt["finish_reason"] == "error"
        assert receipt["first_token_s"] is None
        assert receipt["route"] == "/v1/chat/completions"


async def test_a_client_that_leaves_has_one_too() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.stall_after = 2
        request = asyncio.create_task(stack.events(PICTURE))
        await until(lambda: stack.worker.num_running == 1)
        await asyncio.sleep(0.05)
        request.cancel()
        await until(lambda: not stack.worker.num_running)
        [receipt] = await receipts(stack)
        assert (receipt["status"], receipt["finish_reason"], receipt["error"]) == (499, "cancelled", None)
        assert receipt["completion_tokens"] == 2
        assert receipt["cache_tokens"] == {"l1": 1, "l2": 1, "l3": 1, "healed": 2}
        assert by_name(receipt)["decode", "decode"] > 0.02


async def test_an_attempt_that_was_lost_is_told() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.die_after = 2
        request = asyncio.create_task(stack.ask(return_timings=True))
        await until(lambda: stack.worker._endpoint is None)
        stack.worker.start()
        _, body, _ = await request
        timings = body["timings"]
        assert timings["num_attempts"] == 2
        assert [step["name"] for step in timings["steps"] if step["stage"] == "decode"] == ["decode", "decode"]
        assert covered_s(timings["steps"]) >= timings["duration_s"] - 0.03


async def test_choices_and_bare_prompts() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.step_s = 0.01
        body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "return_timings": True}
        async with stack.session.post("/v1/completions", json=body) as response:
            timings = (await response.json())["timings"]
        assert timings["route"] == "/v1/completions"
        assert (timings["num_choices"], timings["num_attempts"]) == (4, 4)
        for index in range(4):
            own = [step for step in timings["steps"] if step["item"] == f"choices[{index}]"]
            waits = ["prefix_wait"] if index % 2 else []
            names = [step["name"] for step in own]
            assert [name for name in names if name != "dispatch"] == [*waits, "queue", "compute", "decode"]
            for earlier, later in pairwise(own):
                assert later["start_s"] >= earlier["start_s"] + earlier["duration_s"] - 2e-6
        assert covered_s(timings["steps"]) >= timings["duration_s"] - 0.03


SECONDS = st.floats(0, 5, allow_nan=False)
TOLD = st.dictionaries(
    st.sampled_from(["queue_s", "inputs_s", "prefill_s", "transfer_s", "decode_queue_s", "decode_s"]), SECONDS
)


@given(st.lists(SECONDS, min_size=4, max_size=4).map(sorted), TOLD, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_steps_fit_whatever_workers_say(
    moments: list[float], told: dict[str, float], has_token: bool, was_heard: bool
) -> None:
    """Clocks of other processes may be wrong by any amount: steps then are, but never leave the time that passed."""
    dispatched_s, first_s, began_s, stop_s = moments
    account = account_at(0.0)
    times = AttemptTimes(
        dispatched_s=dispatched_s,
        first_token_s=first_s if has_token else None,
        decode_began_s=began_s if was_heard else None,
        timings=told,
    )
    times.enter(account, stop_s, item="x")
    check_chain(account.receipt().steps, dispatched_s, stop_s)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.lists(SECONDS, min_size=2, max_size=2).map(sorted))
@settings(max_examples=200, deadline=None)
def test_steps_of_an_encoder_fit_too(
    queue_s: float, prepare_s: float, batch_wait_s: float, tower_s: float, moments: list[float]
) -> None:
    account, (start_s, stop_s) = account_at(0.0), moments
    timings = StageTimings(queue_s=queue_s, prepare_s=prepare_s, batch_wait_s=batch_wait_s, tower_s=tower_s)
    account.encoded(timings, start_s, stop_s, item="x")
    for step in account.receipt().steps:
        assert start_s - 1e-9 <= step.start_s <= step.stop_s <= stop_s + 1e-9


def check_chain(steps: tuple[Step, ...], start_s: float, stop_s: float) -> None:
    """One after the other, without a gap."""
    at = start_s
    for step in steps:
        assert step.start_s == pytest.approx(at, abs=1e-9)
        at = step.stop_s
    assert at == pytest.approx(stop_s, abs=1e-9)


def account_at(started_s: float) -> Account:
    return Account(
        request_id="r",
        model=MODEL,
        route="/",
        arrival_unix_s=1.0,
        clock=lambda: 10.0,
        started_s=started_s,
    )


def test_rounded_steps_still_touch() -> None:
    steps = (
        Step(stage="gateway", name="read", start_s=0.0000004, duration_s=0.0000011),
        Step(stage="gateway", name="parse", start_s=0.0000015, duration_s=0.1),
    )
    receipt = Receipt(
        request_id="r",
        model="m",
        arrival_unix_s=1.0,
        route="/",
        status=200,
        finish_reason="stop",
        duration_s=0.2,
        steps=steps,
    )
    first, second = receipt.to_json()["steps"]
    assert first["start_s"] + first["duration_s"] == pytest.approx(second["start_s"], abs=1e-12)
