"""Schedules of faults: every request ends once, with the whole answer or one error, and leaves nothing behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest

from encoder.errors import EncoderBusy, EncoderError
from epd.transport.base import Peer
from epd.types import Finish, FinishReason, GenerateRequest, Role, TokenDelta, Usage
from preprocess.errors import MediaError, MediaUndecodable
from tests.fakes.gateway import (
    IMAGE_URL,
    RENDERER,
    Stack,
    chat_body,
    running_gateway,
    says,
    text_of,
    text_of_events,
)
from tests.fakes.stages import FakeWorker, until

TEXT = "one two three four five six"
PICTURE = [{"type": "image_url", "image_url": {"url": IMAGE_URL}}, {"type": "text", "text": "?"}]
NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)


@asynccontextmanager
async def restarting(worker: FakeWorker) -> AsyncIterator[None]:
    """A supervisor: the worker comes back a moment after it died."""

    async def supervise() -> None:
        while True:
            await asyncio.sleep(0.02)
            if worker._endpoint is None:
                worker.start()

    task = asyncio.create_task(supervise())
    try:
        yield
    finally:
        task.cancel()


async def settled(stack: Stack) -> None:
    """Wait for aborts to arrive, then look at the books."""
    await until(lambda: not any(worker.num_running for worker in stack.workers))
    assert not stack.encoder.leases, "a lease outlived its request"
    assert await stack.metric("mimo_gateway_inflight_requests") == 0


@pytest.mark.parametrize("die_after", [0, 1, 3, 6])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_dies_costs_nothing_but_time(die_after: int, stream: bool) -> None:
    async with running_gateway(says(TEXT)) as stack, restarting(stack.worker):
        stack.worker.die_after = die_after
        if stream:
            assert text_of_events(await stack.events(PICTURE)) == TEXT
        else:
            status, body, _ = await stack.ask(PICTURE)
            assert status == 200, body
            assert text_of(body) == TEXT
            assert body["usage"]["completion_tokens"] == len(RENDERER.vocabulary.encode(TEXT)) + 1
        first, second = stack.worker.submitted
        assert second.request_id.endswith("#2")
        assert first.request_id.removesuffix("#1") == second.request_id.removesuffix("#2")
        assert second.num_emitted == die_after
        assert second.token_ids == first.token_ids + tuple(RENDERER.vocabulary.encode(TEXT)[:die_after])
        assert second.sampling == first.sampling
        assert second.embeddings != first.embeddings, "the refs may have died with the stage"
        assert await stack.metric("mimo_gateway_retries_total") == 1
        await settled(stack)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("die_after", [0, 1, 3])
async def test_either_half_of_a_split_pair_may_die(victim: int, die_after: int) -> None:
    async with running_gateway(says(TEXT), roles=(Role.PREFILL, Role.DECODE)) as stack:
        worker = stack.workers[victim]
        worker.die_after = die_after
        async with restarting(worker):
            status, body, _ = await stack.ask(PICTURE)
        assert (status, text_of(body)) == (200, TEXT)
        await settled(stack)


async def test_prefill_may_die_after_the_hand_over() -> None:
    async with running_gateway(says(TEXT), roles=(Role.PREFILL, Role.DECODE)) as stack:
        prefill, decode = stack.workers
        decode.stall_after = 3
        request = asyncio.create_task(stack.ask())
        await until(lambda: decode.num_running == 1)
        await asyncio.sleep(0.02)
        prefill.die()
        await asyncio.sleep(0.05)
        assert not request.done()
        assert len(decode.submitted) == 1, "the request was tried again although decode had it"
        request.cancel()


async def test_another_worker_takes_over() -> None:
    async with running_gateway(says(TEXT), roles=(Role.BOTH, Role.BOTH)) as stack:
        for worker in stack.workers:
            worker.die_after = 2
        # The first to be chosen dies, the other one is chosen next and dies as well, then nobody is left.
        status, body, headers = await stack.ask(max_tokens=6)
        assert status == 503
        assert body["error"]["code"] == "stage_unavailable"
        assert "Retry-After" in headers
        async with restarting(stack.workers[0]), restarting(stack.workers[1]):
            status, body, _ = await stack.ask()
            assert (status, text_of(body)) == (200, TEXT)
        await settled(stack)


async def test_one_dead_worker_of_two_is_avoided() -> None:
    async with running_gateway(says(TEXT), roles=(Role.BOTH, Role.BOTH)) as stack:
        stack.workers[0].die_after = 3
        stack.workers[1].die_after = None
        results = await asyncio.gather(*(stack.ask(f"question {i}") for i in range(12)))
        assert {(status, text_of(body)) for status, body, _ in results} == {(200, TEXT)}
        await settled(stack)


async def test_attempts_are_bounded() -> None:
    finish = Finish(
        request_id="", reason=FinishReason.FAILED, usage=NO_USAGE, status=503, code="x", message="no", retryable=True
    )
    async with running_gateway(max_attempts=3) as stack:
        stack.worker.finish = finish
        status, body, _ = await stack.ask()
        assert status == 503
        assert "3 attempts" in body["error"]["message"]
        assert len(stack.worker.submitted) == 3
        await settled(stack)


async def test_a_failure_with_a_reason_is_passed_on() -> None:
    finish = Finish(
        request_id="", reason=FinishReason.FAILED, usage=NO_USAGE, status=422, code="bad_thing", message="because"
    )
    async with running_gateway() as stack:
        stack.worker.finish = finish
        status, body, _ = await stack.ask()
        assert (status, body["error"]["code"], body["error"]["message"]) == (422, "bad_thing", "because")
        assert len(stack.worker.submitted) == 1


async def test_a_stage_that_is_down_is_waited_for_and_then_refused() -> None:
    async with running_gateway(says(TEXT), restart_wait_s=0.2) as stack:
        stack.worker.die()
        await asyncio.sleep(0.01)
        status, body, headers = await stack.ask()
        assert status == 503
        assert "both" in body["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        late = asyncio.create_task(stack.ask())
        await asyncio.sleep(0.05)
        stack.worker.start()
        status, body, _ = await late
        assert (status, text_of(body)) == (200, TEXT)


async def test_a_silent_worker_is_given_up() -> None:
    async with running_gateway(says(TEXT), roles=(Role.BOTH, Role.BOTH), worker_timeout_s=0.2) as stack:
        stack.workers[0].stall_after = stack.workers[1].stall_after = 2
        request = asyncio.create_task(stack.ask())
        await until(lambda: any(worker.submitted for worker in stack.workers))
        stuck = next(worker for worker in stack.workers if worker.submitted)
        other = next(worker for worker in stack.workers if worker is not stuck)
        other.stall_after = None
        stuck.mute = True
        status, body, _ = await request
        assert (status, text_of(body)) == (200, TEXT)
        assert other.submitted[0].num_emitted == 2


async def test_a_client_that_leaves_stops_the_work() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.stall_after = 2
        body = chat_body(PICTURE)
        for stream in (False, True):
            requests = [
                asyncio.create_task(stack.session.post("/v1/chat/completions", json={**body, "stream": stream}))
                for _ in range(10)
            ]
            await until(lambda: stack.worker.num_running == 10)
            await asyncio.sleep(0.02)
            for request in requests:
                if request.done():
                    request.result().close()
                request.cancel()
            await settled(stack)
        assert len(stack.worker.aborted) >= 20


async def test_late_messages_are_dropped_and_answered_with_abort() -> None:
    async with running_gateway(says(TEXT)) as stack:
        assert (await stack.ask())[0] == 200
        worker = stack.worker
        peer = next(iter(worker._endpoint._channels))  # type: ignore[union-attr]
        stray = TokenDelta(request_id="chatcmpl-old#1", index=0, token_ids=(5,))
        worker.aborted.clear()
        for _ in range(3):
            worker.say(Peer(peer), stray)
        worker.say(Peer(peer), Finish(request_id="chatcmpl-old#1", reason=FinishReason.STOP, usage=NO_USAGE))
        status, body, _ = await stack.ask()
        assert (status, text_of(body)) == (200, TEXT)
        await asyncio.sleep(0.02)
        assert worker.aborted == ["chatcmpl-old#1"]
        assert await stack.metric("mimo_gateway_late_messages_total") >= 4


ENCODER_FAULTS: list[tuple[MediaError | EncoderError, int]] = [
    (MediaUndecodable("truncated PNG"), 422),
    (EncoderBusy("full", retry_after_s=2.0), 503),
]


@pytest.mark.parametrize(("error", "status"), ENCODER_FAULTS)
async def test_a_bad_medium_names_its_part_and_nothing_leaks(error: MediaError | EncoderError, status: int) -> None:
    async with running_gateway() as stack:
        stack.fetcher.contents["https://media.test/bad.png"] = b"bad"
        stack.encoder.errors[b"bad"] = error
        bad = {"type": "image_url", "image_url": {"url": "https://media.test/bad.png"}}
        found, body, headers = await stack.ask([*PICTURE, bad])
        assert found == status
        assert body["error"]["param"] == "messages[0].content[2].image_url"
        assert not stack.worker.submitted
        if status == 503:
            assert headers["Retry-After"] == "2"
        assert (await stack.ask(PICTURE))[0] == 200
        await settled(stack)


async def test_an_encoder_that_is_down_is_waited_for() -> None:
    async with running_gateway(says(TEXT), restart_wait_s=0.3) as stack:
        stack.encoder.up = False
        request = asyncio.create_task(stack.ask(PICTURE))
        await asyncio.sleep(0.05)
        stack.encoder.up = True
        status, body, _ = await request
        assert (status, text_of(body)) == (200, TEXT)
        stack.encoder.up = False
        status, body, _ = await stack.ask(PICTURE)
        assert (status, body["error"]["code"]) == (503, "encoder_unavailable")
        assert (await stack.ask("text only"))[0] == 200


async def test_the_deadline_ends_a_request() -> None:
    async with running_gateway(says(TEXT), request_timeout_s=0.2) as stack:
        stack.worker.stall_after = 2
        status, body, _ = await stack.ask(PICTURE)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        events = await stack.events(PICTURE)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await settled(stack)


async def test_an_error_inside_a_stream_is_its_last_event() -> None:
    async with running_gateway(says(TEXT), restart_wait_s=0.1) as stack:
        stack.worker.die_after = 3
        events = await stack.events()
        assert text_of_events(events[:-1]) == RENDERER.vocabulary.spell(RENDERER.vocabulary.encode(TEXT)[:3]).decode()
        assert events[-1]["error"]["code"] == "stage_unavailable"
        assert "[DONE]" not in events


async def test_an_error_before_the_stream_has_its_own_status() -> None:
    async with running_gateway(restart_wait_s=0.1) as stack:
        stack.worker.die()
        await asyncio.sleep(0.01)
        status, body, _ = await stack.ask(stream=True)
        assert (status, body["error"]["code"]) == (503, "stage_unavailable")


async def test_admission_is_bounded() -> None:
    async with running_gateway(says(TEXT), max_inflight=2) as stack:
        stack.worker.stall_after = 1
        waiting = [asyncio.create_task(stack.ask()) for _ in range(2)]
        await until(lambda: stack.worker.num_running == 2)
        status, body, headers = await stack.ask()
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "overloaded", "1")
        for request in waiting:
            request.cancel()
        await settled(stack)


async def test_one_client_id_for_two_requests_mixes_nothing() -> None:
    async with running_gateway(lambda request: RENDERER.vocabulary.encode(f"{len(request.token_ids)}")) as stack:
        headers = {"X-Request-Id": "mine"}
        bodies = [chat_body("x" * i) for i in (1, 400)]
        (_, first, first_headers), (_, second, _) = await asyncio.gather(
            *(stack.post(body, headers=headers) for body in bodies)
        )
        assert first_headers["X-Request-Id"] == "mine"
        assert text_of(first) == str(first["usage"]["prompt_tokens"])
        assert text_of(second) == str(second["usage"]["prompt_tokens"])


async def test_a_stream_survives_a_slow_reader() -> None:
    async with running_gateway(says("word " * 200)) as stack:
        text = ""
        async with stack.session.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    text += delta.get("content") or ""
                await asyncio.sleep(0)
        assert text == "word " * 200


async def test_the_gateway_stops_with_requests_in_flight() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.stall_after = 1
        request = asyncio.create_task(stack.ask())
        await until(lambda: stack.worker.num_running == 1)
        request.cancel()
        with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
            await request


async def test_far_more_requests_than_places_all_end() -> None:
    async with running_gateway(says(TEXT), max_inflight=32) as stack:
        results = await asyncio.gather(*(stack.ask(PICTURE, stream=False) for _ in range(200)))
        assert {status for status, _, _ in results} <= {200, 503}
        assert all(text_of(body) == TEXT for status, body, _ in results if status == 200)
        assert sum(status == 200 for status, _, _ in results) >= 32
        await settled(stack)


async def test_leaving_in_the_middle_of_a_stream_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway(lambda _: RENDERER.vocabulary.encode("word " * 3000)) as stack:
        for _ in range(5):
            response = await stack.session.post("/v1/chat/completions", json=chat_body(stream=True, max_tokens=3500))
            await response.content.readany()
            response.close()
        await settled(stack)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


async def test_an_unforeseen_error_inside_a_stream_is_its_last_event() -> None:
    def answer(request: GenerateRequest) -> Sequence[int]:
        if request.num_emitted:
            stack.encoder.release_error = RuntimeError("nobody thought of this")
        return RENDERER.vocabulary.encode(TEXT)

    async with running_gateway(answer) as stack, restarting(stack.worker):
        stack.worker.die_after = 2
        events = await stack.events(PICTURE)
        assert events[-1]["error"]["code"] == "internal_error"
        assert "nobody" not in events[-1]["error"]["message"]
        assert await stack.metric("mimo_gateway_inflight_requests") == 0


async def test_a_request_that_its_worker_dropped_without_a_word_is_sent_again() -> None:
    async with running_gateway(says(TEXT)) as stack:
        stack.worker.stall_after = 2
        request = asyncio.create_task(stack.ask())
        await until(lambda: stack.worker.num_running == 1)
        await asyncio.sleep(0.05)
        stack.worker.stall_after = None
        for task in list(stack.worker._running.values()):
            task.cancel()
        status, body, _ = await asyncio.wait_for(request, 5)
        assert (status, text_of(body)) == (200, TEXT)
        assert [each.num_emitted for each in stack.worker.submitted] == [0, 2]


async def test_a_request_that_its_worker_hands_back_is_sent_again_at_once() -> None:
    back = Finish(request_id="", reason=FinishReason.FAILED, usage=NO_USAGE, status=503, code="silent", retryable=True)
    async with running_gateway(says(TEXT), heartbeat_s=5.0) as stack:
        stack.worker.finish = back
        request = asyncio.create_task(stack.ask())
        await until(lambda: len(stack.worker.submitted) == 1)
        stack.worker.finish = None
        status, body, _ = await asyncio.wait_for(request, 2)
        assert (status, text_of(body)) == (200, TEXT)
